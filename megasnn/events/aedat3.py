"""AEDAT 3.1, as cAER writes it and DVS128 Gesture is published: lines of text, then packets of events of one type.

A packet begins with 28 bytes, little-endian: type, source (16 bits each), then 32 bits each for the size of an event,
the offset of its time, the overflow of time, the capacity, the number of events and the number of valid ones. Polarity
events (type 1) have 8 bytes: bit 0 valid, bit 1 polarity, bits 2-16 y, bits 17-31 x; then 31 bits of the time in
microseconds, which the packet's overflow continues. All as SpikingJelly's `load_aedat_v3` reads it, except that events
marked as invalid are left out.

Source: the AEDAT 3.1 format page of inivation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from megasnn.events.aedat_header import Header, read_header, sensor_named
from megasnn.events.recording import Decoded, Events, RecordingError, SensorSize

POLARITY = 1
EVENT_BYTES = 8
PACKET_HEADER = np.dtype(
    [("type", "<i2"), ("source", "<i2")]
    + [(name, "<i4") for name in ("size", "time_offset", "overflow", "capacity", "number", "valid")]
)


class _Packet(NamedTuple):
    overflow: int
    number: int
    start: int  # first byte of its events


def decode_aedat3(data: bytes, name: str, sensor: SensorSize | None = None) -> Decoded:
    """Decodes the bytes of an AEDAT 3.1 file.

    Args:
        data: the whole file.
        name: of the file, for messages.
        sensor: by default what the header's Source line says.

    Raises:
        RecordingError: cut, empty, another version, compressed, or an unknown sensor.
    """
    header = read_header(data, name, "3.1")
    sensor = sensor or _sensor_of(header, name)
    if (packing := header.value("Format")) not in (None, "RAW"):
        raise RecordingError(name, f"has packets in the format {packing!r}; only RAW is read")
    packets = list(_packets(data, header.end, name))
    numbers = np.array([packet.number for packet in packets], np.int64)
    words = _event_words(data, packets)
    overflow = np.repeat(np.array([packet.overflow for packet in packets], np.int64) << 31, numbers)
    address = words["address"].astype(np.uint32)
    t = words["t"].astype(np.int64) | overflow
    valid = address & 1 != 0
    kept = None if valid.all() else np.flatnonzero(valid)
    if kept is not None:
        address, t = address[kept], t[kept]
    events = Events(
        t=t,
        x=(address >> 17).astype(np.uint16),
        y=(address >> 2 & 0x7FFF).astype(np.uint16),
        p=(address >> 1 & 1).astype(np.uint8),
    )
    first_of_packet = np.cumsum(numbers) - numbers

    def place(index: int) -> str:
        number = index if kept is None else int(kept[index])
        packet = int(np.searchsorted(first_of_packet, number, side="right")) - 1
        byte = packets[packet].start + EVENT_BYTES * (number - int(first_of_packet[packet]))
        return f"event {number} (byte {byte})"

    return Decoded(events, sensor, "aedat3", skipped=len(words) - len(events), place=place)


def _sensor_of(header: Header, name: str) -> SensorSize:
    source = next((line for line in header.lines if line.lower().startswith("#source")), "")
    sensor = sensor_named(source)
    if sensor is None:
        raise RecordingError(name, f"does not say which known sensor it comes from ({source!r}); pass its sensor size")
    return sensor


def _packets(data: bytes, position: int, name: str) -> Iterator[_Packet]:
    """Those with polarity events; all are checked."""
    while position < len(data):
        start = position + PACKET_HEADER.itemsize
        if start > len(data):
            raise RecordingError(name, f"is cut: the header of the packet at byte {position} is not complete")
        fields = np.frombuffer(data, PACKET_HEADER, 1, position)[0]
        kind, size, capacity, number = (int(fields[field]) for field in ("type", "size", "capacity", "number"))
        if kind == POLARITY and size != EVENT_BYTES or size <= 0 or not 0 <= number <= capacity:
            raise RecordingError(
                name,
                f"the packet at byte {position} makes no sense: type {kind}, {number} events of {size} bytes, "
                f"room for {capacity}",
            )
        position = start + capacity * size
        if position > len(data):
            raise RecordingError(
                name,
                f"is cut: the packet at byte {start} should have {capacity * size} bytes, {len(data) - start} are left",
            )
        if kind == POLARITY and number:
            yield _Packet(int(fields["overflow"]), number, start)


def _event_words(data: bytes, packets: list[_Packet]) -> np.ndarray:
    """Address and time of the polarity events of all packets."""
    word = np.dtype([("address", "<u4"), ("t", "<u4")])
    parts = [np.frombuffer(data, word, packet.number, packet.start) for packet in packets]
    return np.concatenate(parts) if parts else np.empty(0, word)
