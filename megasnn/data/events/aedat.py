"""AEDAT 2.0 and 3.1: lines of text that begin with '#', then events of 8 bytes.

CIFAR10-DVS is published in AEDAT 2.0 (jAER), DVS128 Gesture in AEDAT 3.1 (cAER).

Sources: the AEDAT 2.0 and 3.1 format pages of inivation; jAER's chip classes DVS128 and DavisBaseCamera.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

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

# jAER and cAER close the header with such a line, after which a '#' is data.
_LAST_LINE = re.compile(r"#\s*(End Of ASCII Header|!END-HEADER)\s*$", re.IGNORECASE)
_HEADER_BYTES = 1 << 20
_EVENT_BYTES = 8

_DVS128_FOREIGN = 0x7FFF_0000
_DVS128_TRIGGERS = 0x8000_8000
_DAVIS_NOT_A_PIXEL = 0x8000_0000 | 0x0400

_POLARITY = 1
PACKET_HEADER = np.dtype(
    [("type", "<i2"), ("source", "<i2")]
    + [(name, "<i4") for name in ("size", "time_offset", "overflow", "capacity", "number", "valid")]
)


def decode_aedat2(data: bytes, sensor: SensorSize | None = None, transpose_dvs128: bool = False) -> Recording:
    """Decodes AEDAT 2.0: a 32-bit address and a 32-bit time in microseconds for each event, big-endian.

    - DVS128: bit 0 polarity, inverted; bits 1-7 x, bits 8-14 y; bits 15 and 31 mark triggers.
    - DAVIS: bit 11 polarity; bits 12-21 x; bits 22-30 y; bit 31 marks samples of frames and of the motion sensor, bit
      10 triggers.

    Columns are counted from the right and rows from the bottom; the recording has them from the left and from the top,
    as jAER shows them.

    Args:
        sensor: for files whose header has no AEChip line; by default a DVS128.
        transpose_dvs128: gives a DVS128's column as y and its row as x. The literature on CIFAR10-DVS has images so,
            since SpikingJelly reads it so.

    Raises:
        ValueError: cut, an unknown sensor, or addresses that the sensor does not have.
    """
    lines, start = _read_header(data)
    if (len(data) - start) % _EVENT_BYTES:
        raise ValueError(f"is cut: it ends inside an event of {_EVENT_BYTES} bytes, at byte {len(data)}")
    chip = next((line for line in lines if re.match(r"#\s*AEChip\s*:", line, re.IGNORECASE)), None)
    sensor = (sensor or DVS128) if chip is None else _sensor_in(chip)
    if sensor is None or sensor not in SENSORS.values():
        raise ValueError(f"comes from a sensor of unknown addresses ({chip or sensor}); known: {', '.join(SENSORS)}")
    address, time = np.frombuffer(data, ">u4", offset=start).astype(np.uint32).reshape(-1, 2).T
    if sensor == DVS128:
        if (foreign := address & _DVS128_FOREIGN != 0).any():
            index = int(foreign.argmax())
            raise ValueError(
                f"address {address[index]:#x} at event {index} is no DVS128's; "
                "pass its sensor size (--sensor-size HEIGHT WIDTH)"
            )
        kept = address & _DVS128_TRIGGERS == 0
        address = address[kept]
        column = address >> 1 & 0x7F
        row = address >> 8 & 0x7F
        p = ~address & 1
    else:
        kept = address & _DAVIS_NOT_A_PIXEL == 0
        address = address[kept]
        column = address >> 12 & 0x3FF
        row = address >> 22 & 0x1FF
        p = address >> 11 & 1
    if (outside := (column >= sensor.width) | (row >= sensor.height)).any():
        index = int(outside.argmax())
        raise ValueError(
            f"column {column[index]} and row {row[index]} at event {index} are outside {sensor} (--sensor-size)"
        )
    x = sensor.width - 1 - column
    y = sensor.height - 1 - row
    if sensor == DVS128 and transpose_dvs128:
        x, y = y, x
    return Recording(Events.make(_unwrap_jaer(time[kept]), x, y, p), sensor)


def _unwrap_jaer(time: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Times without their wraps: of 31 bits, as cAER counts, where no time needs the 32nd, and otherwise of 32."""
    bits = 32 if time.max(initial=0) >> 31 else 31
    return unwrap(time, bits)


def decode_aedat3(data: bytes, sensor: SensorSize | None = None) -> Recording:
    """Decodes AEDAT 3.1: packets of events of one type, of which the polarity events (type 1) are taken.

    Coordinates and polarity are those of SpikingJelly's reader. A packet begins with `PACKET_HEADER`. An event has 8
    bytes, little-endian: bit 0 valid, bit 1 polarity, bits 2-16 y, bits 17-31 x; then 31 bits of the time in
    microseconds, which the packet's overflow continues.

    Args:
        sensor: for files whose Source line names no known one.

    Raises:
        ValueError: cut, compressed, or an unknown sensor.
    """
    lines, start = _read_header(data)
    source = next((line for line in lines if line.lower().startswith("#source")), "")
    sensor = _sensor_in(source) or sensor
    if sensor is None:
        raise ValueError(
            f"does not say which known sensor it comes from ({source!r}); "
            "pass its sensor size (--sensor-size HEIGHT WIDTH)"
        )
    packing = next((line for line in lines if line.lower().startswith("#format")), "RAW")
    if not packing.endswith("RAW"):
        raise ValueError(f"has compressed packets ({packing}); only RAW is read")
    packets = [np.empty((0, 2), np.int64), *_polarity_packets(data, start)]
    address, t = np.concatenate(packets).T
    events = Events.make(t, address >> 17, address >> 2 & 0x7FFF, address >> 1 & 1)
    return Recording(events[address & 1 != 0], sensor)


def _polarity_packets(data: bytes, position: int) -> Iterator[NDArray[np.int64]]:
    """Address and time [number, 2] of each packet of polarity events; all packets are checked."""
    while position < len(data):
        start = position + PACKET_HEADER.itemsize
        if start > len(data):
            raise ValueError(f"is cut: the header of the packet at byte {position} is not complete")
        header = np.frombuffer(data, PACKET_HEADER, 1, position)[0]
        kind, size, capacity, number = (int(header[field]) for field in ("type", "size", "capacity", "number"))
        if kind == _POLARITY and size != _EVENT_BYTES or size <= 0 or not 0 <= number <= capacity:
            raise ValueError(
                f"the packet at byte {position} makes no sense: type {kind}, {number} events of {size} bytes, "
                f"capacity {capacity}"
            )
        if start + capacity * size > len(data):
            raise ValueError(f"is cut: the packet at byte {position} should have {capacity * size} bytes")
        if kind == _POLARITY:
            words = np.frombuffer(data, "<u4", 2 * number, start).reshape(-1, 2).astype(np.int64)
            words[:, 1] += int(header["overflow"]) << 31
            yield words
        position = start + capacity * size


def _read_header(data: bytes) -> tuple[list[str], int]:
    """Lines that begin with '#', up to the closing one; and the first byte behind them."""
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


def _sensor_in(text: str) -> SensorSize | None:
    """Sensor whose name is in a text such as "eu.seebetter.ini.chips.davis.DAVIS346B"."""
    return next((size for name, size in SENSORS.items() if name in text.upper()), None)
