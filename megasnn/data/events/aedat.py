"""AEDAT 2.0 and 3.1: text lines beginning with '#', then events in 8 bytes each.

CIFAR10-DVS is published in AEDAT 2.0 (jAER), DVS128 Gesture in AEDAT 3.1 (cAER).

Sources: iniVation's pages on AEDAT 2.0 and 3.1; jAER's chip classes DVS128 and DavisBaseCamera.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megasnn.data.events.clock import unwrap
from megasnn.data.events.frames import Events, Recording, SensorSize

DVS128 = SensorSize(128, 128)
SENSORS = {
    "DVS128": DVS128,
    "DAVIS240": SensorSize(180, 240),
    "DAVIS346": SensorSize(260, 346),
    "DAVIS640": SensorSize(480, 640),
}

# jAER and cAER close the header with one of these lines: a '#' after it is data.
_LAST_LINE = re.compile(r"#\s*(End Of ASCII Header|!END-HEADER)\s*$", re.IGNORECASE)
_HEADER_BYTES = 1 << 20
_EVENT_BYTES = 8
_LONGEST_SILENCE = 60_000_000  # us across a wrap of the clock; a DVS sends noise many times a second

_DVS128_FOREIGN = 0x7FFF_0000
_DVS128_TRIGGERS = 0x8000_8000
_DAVIS_NOT_A_PIXEL = 0x8000_0000 | 0x0400

_POLARITY = 1
PACKET_HEADER = np.dtype(
    [
        ("type", "<i2"),
        ("source", "<i2"),
        ("size", "<i4"),
        ("time_offset", "<i4"),
        ("overflow", "<i4"),
        ("capacity", "<i4"),
        ("number", "<i4"),
        ("valid", "<i4"),
    ]
)


def decode_aedat2(data: bytes, sensor: SensorSize | None = None, transpose_dvs128: bool = False) -> Recording:
    """Decodes AEDAT 2.0: big-endian pairs, 32-bit address and 32-bit time in microseconds.

    Args:
        sensor: for files without an AEChip line; by default a DVS128.
        transpose_dvs128: swap a DVS128's x and y, as SpikingJelly and the literature on CIFAR10-DVS do.

    Raises:
        ValueError: cut, an unknown sensor, or addresses outside it.
    """
    lines, start = _read_header(data)
    if (len(data) - start) % _EVENT_BYTES:
        raise ValueError(f"is cut: it ends inside an event of {_EVENT_BYTES} bytes, at byte {len(data)}")
    chip = _line(lines, r"#\s*AEChip\s*:")
    sensor = (sensor or DVS128) if chip is None else _sensor_in(chip)
    if sensor is None or sensor not in SENSORS.values():
        raise ValueError(f"has a sensor with unknown addresses ({chip or sensor}); known are {', '.join(SENSORS)}")
    address, time = np.frombuffer(data, ">u4", offset=start).astype(np.uint32).reshape(-1, 2).T
    if sensor == DVS128:
        # Bit 0: inverted polarity. Bits 1-7: x. Bits 8-14: y. Bits 15 and 31: triggers.
        _require_dvs128(address)
        is_pixel = address & _DVS128_TRIGGERS == 0
        address = address[is_pixel]
        column = address >> 1 & 0x7F
        row = address >> 8 & 0x7F
        p = ~address & 1
    else:
        # Bit 10: triggers. Bit 11: polarity. Bits 12-21: x. Bits 22-30: y. Bit 31: frame and motion samples.
        is_pixel = address & _DAVIS_NOT_A_PIXEL == 0
        address = address[is_pixel]
        column = address >> 12 & 0x3FF
        row = address >> 22 & 0x1FF
        p = address >> 11 & 1
    outside = (column >= sensor.width) | (row >= sensor.height)
    if outside.any():
        index = int(outside.argmax())
        raise ValueError(
            f"column {column[index]} and row {row[index]} at event {index} are outside {sensor} (--sensor-size)"
        )
    # The file counts columns from the right and rows from the bottom; jAER displays them as here.
    x = sensor.width - 1 - column
    y = sensor.height - 1 - row
    if sensor == DVS128 and transpose_dvs128:
        x, y = y, x
    time = time[is_pixel]
    # jAER counts 32 bits, cAER 31. Both clocks can also be reset to 0: only a fall from the end of the range is a wrap.
    bits = 32 if time.max(initial=0) >> 31 else 31
    return Recording(Events.make(unwrap(time, bits, _LONGEST_SILENCE), x, y, p), sensor)


def _require_dvs128(address: NDArray[np.uint32]) -> None:
    foreign = address & _DVS128_FOREIGN != 0
    if foreign.any():
        index = int(foreign.argmax())
        raise ValueError(
            f"address {address[index]:#x} at event {index} is not a DVS128's; "
            "give the sensor's size (--sensor-size HEIGHT WIDTH)"
        )


def decode_aedat3(data: bytes, sensor: SensorSize | None = None) -> Recording:
    """Decodes polarity events in AEDAT 3.1; coordinates and polarity as in SpikingJelly.

    Args:
        sensor: for files whose Source line names no known sensor.

    Raises:
        ValueError: cut, compressed, or an unknown sensor.
    """
    lines, start = _read_header(data)
    source = _line(lines, "#source") or ""
    sensor = _sensor_in(source) or sensor
    if sensor is None:
        raise ValueError(f"names no known sensor ({source!r}); give its size (--sensor-size HEIGHT WIDTH)")
    packing = _line(lines, "#format") or "RAW"
    if not packing.endswith("RAW"):
        raise ValueError(f"has compressed packets ({packing}); only RAW is read")
    packets = [np.empty((0, 2), np.int64), *_polarity_packets(data, start)]
    address, t = np.concatenate(packets).T
    # Bit 0: valid. Bit 1: polarity. Bits 2-16: y. Bits 17-31: x.
    events = Events.make(t, address >> 17, address >> 2 & 0x7FFF, address >> 1 & 1)
    return Recording(events[address & 1 != 0], sensor)


def _polarity_packets(data: bytes, position: int) -> Iterator[NDArray[np.int64]]:
    """Yields address and time [number, 2] from each packet with polarity events."""
    while position < len(data):
        start = position + PACKET_HEADER.itemsize
        if start > len(data):
            raise ValueError(f"is cut: the header of the packet at byte {position} is incomplete")
        header = np.frombuffer(data, PACKET_HEADER, 1, position)[0]
        kind = int(header["type"])
        size = int(header["size"])
        capacity = int(header["capacity"])
        number = int(header["number"])
        if kind == _POLARITY and size != _EVENT_BYTES or size <= 0 or not 0 <= number <= capacity:
            raise ValueError(
                f"the packet at byte {position} is invalid: type {kind}, {number} events of {size} bytes, capacity "
                f"{capacity}"
            )
        if start + capacity * size > len(data):
            raise ValueError(f"is cut: the packet at byte {position} should have {capacity * size} bytes")
        if kind == _POLARITY:
            words = np.frombuffer(data, "<u4", 2 * number, start).reshape(-1, 2).astype(np.int64)
            words[:, 1] += int(header["overflow"]) << 31  # times have 31 bits
            yield words
        # Unused events follow the used ones.
        position = start + capacity * size


def _read_header(data: bytes) -> tuple[list[str], int]:
    """Header lines, and the first byte after them."""
    lines: list[str] = []
    position = 0
    while data.startswith(b"#", position):
        end = data.find(b"\n", position, _HEADER_BYTES)
        if end < 0:
            raise ValueError(f"ends inside its header, in the line at byte {position}")
        lines.append(data[position:end].rstrip().decode("latin-1"))
        position = end + 1
        if _LAST_LINE.match(lines[-1]):
            break
    return lines, position


def _line(lines: Sequence[str], beginning: str) -> str | None:
    """The first line that begins like this, in any case."""
    for line in lines:
        if re.match(beginning, line, re.IGNORECASE):
            return line
    return None


def _sensor_in(text: str) -> SensorSize | None:
    # As in "eu.seebetter.ini.chips.davis.DAVIS346B".
    return next((size for name, size in SENSORS.items() if name in text.upper()), None)
