"""AEDAT 2.0, as jAER writes it and CIFAR10-DVS is published: lines of text, then 8 bytes an event.

An event is a 32-bit address and a 32-bit time in microseconds, big-endian. What the bits of an address mean depends on
the sensor:

- DVS128 (CIFAR10-DVS): bit 0 polarity, inverted; bits 1-7 and 8-14 the pixel; bits 15 and 31 mark triggers. As in
  SpikingJelly's reader of CIFAR10-DVS, x = 127 - bits 8-14 and y = 127 - bits 1-7.
- DAVIS: bit 11 polarity; bits 12-21 x; bits 22-30 y; bit 31 marks samples of frames and of the motion sensor, bit 10
  triggers. x and y are the bits themselves, as SpikingJelly's reader gives them by default.

Source: jAER's chip classes DVS128 and DavisChip, and the AEDAT 2.0 format page of inivation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megasnn.events.aedat_header import DVS128, KNOWN, SENSORS, read_header, sensor_named
from megasnn.events.recording import Decoded, Events, RecordingError, SensorSize

EVENT_BYTES = 8

_EVENT = np.dtype([("high", ">u2"), ("low", ">u2"), ("t", ">u4")])
_DAVIS_EVENT = np.dtype([("address", ">u4"), ("t", ">u4")])
_SPECIAL = 0x8000
_DAVIS_NOT_A_PIXEL = 0x8000_0000 | 0x0400


def decode_aedat2(data: bytes, name: str, sensor: SensorSize | None = None) -> Decoded:
    """Decodes the bytes of an AEDAT 2.0 file.

    Args:
        data: the whole file.
        name: of the file, for messages.
        sensor: one of `SENSORS`, which also says what addresses mean; by default that of the header's AEChip line, or a
            DVS128 where there is none.

    Raises:
        RecordingError: cut, empty, another version, an unknown sensor, or addresses that the sensor does not have.
    """
    header = read_header(data, name, "2.0")
    body = memoryview(data)[header.end :]
    if len(body) % EVENT_BYTES:
        raise RecordingError(
            name,
            f"is cut: {len(body)} bytes after the header are not a multiple of {EVENT_BYTES}; "
            f"the event at byte {header.end + len(body) // EVENT_BYTES * EVENT_BYTES} is not complete",
        )
    sensor = _sensor(sensor, header.value("AEChip"), name)
    events, kept = _decode_dvs128(body, name, header.end) if sensor == DVS128 else _decode_davis(body)

    def place(index: int) -> str:
        number = index if kept is None else int(kept[index])
        return f"event {number} (byte {header.end + EVENT_BYTES * number})"

    return Decoded(events, sensor, "aedat2", skipped=len(body) // EVENT_BYTES - len(events), place=place)


def _sensor(asked: SensorSize | None, chip: str | None, name: str) -> SensorSize:
    if asked is not None and asked not in SENSORS.values():
        raise RecordingError(name, f"is AEDAT 2.0: addresses of a sensor of {asked} are not known; known: {KNOWN}")
    sensor = asked or (DVS128 if chip is None else sensor_named(chip))
    if sensor is None:
        raise RecordingError(name, f"comes from the sensor {chip!r}, whose addresses are not known; known: {KNOWN}")
    return sensor


def _decode_dvs128(body: memoryview, name: str, start: int) -> tuple[Events, NDArray[np.intp] | None]:
    """The events, and the positions of those kept where some were left out."""
    raw = np.frombuffer(body, _EVENT)
    kept = None
    # Two bytes of an address say everything about a DVS128's event; more bits mean another sensor, except the first.
    if raw["high"].any() and (foreign := raw["high"] & ~np.uint16(_SPECIAL) != 0).any():
        index = int(foreign.argmax())
        word = int(raw["high"][index]) << 16 | int(raw["low"][index])
        raise RecordingError(
            name,
            f"address {word:#010x} at event {index} (byte {start + EVENT_BYTES * index}) is none of a DVS128's; "
            f"pass the size of its sensor",
        )
    address = raw["low"].astype(np.uint16)
    t = raw["t"].astype(np.int64)
    special = (address | raw["high"]) & _SPECIAL != 0
    if special.any():
        kept = np.flatnonzero(~special)
        address, t = address[kept], t[kept]
    x = np.uint16(127) - (address >> np.uint16(8))
    y = np.uint16(127) - ((address >> np.uint16(1)) & np.uint16(0x7F))
    p = (~address & 1).astype(np.uint8)
    return Events(t, x, y, p), kept


def _decode_davis(body: memoryview) -> tuple[Events, NDArray[np.intp] | None]:
    raw = np.frombuffer(body, _DAVIS_EVENT)
    address = raw["address"].astype(np.uint32)
    kept = np.flatnonzero(address & _DAVIS_NOT_A_PIXEL == 0)
    address = address[kept]
    x = (address >> 12 & 0x3FF).astype(np.uint16)
    y = (address >> 22 & 0x1FF).astype(np.uint16)
    p = (address >> 11 & 1).astype(np.uint8)
    return Events(raw["t"][kept].astype(np.int64), x, y, p), kept
