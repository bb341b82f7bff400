"""AEDAT 4, as DV writes it: compressed packets of several streams, decoded by the optional package aedat."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from megasnn.events.events import Events, Recording, RecordingError, SensorSize, check_events

MAGIC = b"#!AER-DAT4.0\r\n"


def read_aedat4(path: str, sensor: SensorSize | None = None) -> Recording:
    """Reads the event stream of an AEDAT 4 file; frames, triggers and the motion sensor's data are left out.

    Args:
        path: of the file.
        sensor: by default what the file says.

    Raises:
        RecordingError: cut, empty, another format, no event stream or more than one, coordinates outside the sensor, or
            time that runs backwards.
        ModuleNotFoundError: the package aedat is not installed.
    """
    try:
        import aedat
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path}: AEDAT 4 files are read with the package aedat: pip install megasnn[events]", name="aedat"
        ) from error
    _check_length(path)
    packets: list[np.ndarray] = []
    try:
        decoder = aedat.Decoder(path)
        stream = _event_stream(decoder.id_to_stream(), path)
        packets.extend(packet["events"] for packet in decoder if "events" in packet)
    except RuntimeError as error:
        done = sum(len(packet) for packet in packets)
        raise RecordingError(path, f"cannot be decoded after event {done} ({error})") from error
    if not packets:
        raise RecordingError(path, "has no events")
    raw = np.concatenate(packets)
    events = Events.make(raw["t"], raw["x"], raw["y"], raw["on"])
    sensor = sensor or SensorSize(stream["height"], stream["width"])
    check_events(path, events, sensor)
    return Recording(events, sensor, "aedat4")


def _event_stream(streams: dict[int, dict[str, Any]], path: str) -> dict[str, Any]:
    found = [stream for stream in streams.values() if stream["type"] == "events"]
    if len(found) != 1:
        raise RecordingError(path, f"has {len(found)} event streams; exactly one can be read")
    return found[0]


def _check_length(path: str) -> None:
    """The decoder takes a file that ends between two packets for a whole one; the header says where the table of
    packets begins, which is the last part of a file."""
    with Path(path).open("rb") as file:
        head = file.read(4096)
        size = file.seek(0, 2)
    try:
        table = _table_position(head)
    except struct.error as error:
        raise RecordingError(path, f"is cut: its header is not complete ({size} bytes)") from error
    if table is not None and table >= size:
        raise RecordingError(path, f"is cut: its table of packets begins at byte {table}, the file ends at byte {size}")


def _table_position(head: bytes) -> int | None:
    """From the header, a FlatBuffers table with the compression, the position of the table of packets, and a text.

    None where the program that recorded did not come to write it. Raises struct.error for a header that is cut.
    """
    start = len(MAGIC) + 4  # after the header's size
    root = start + struct.unpack_from("<I", head, start)[0]
    fields = root - struct.unpack_from("<i", head, root)[0]
    last = fields + struct.unpack_from("<H", head, fields)[0]
    entry = fields + 4 + 2  # two sizes, then the offset of each field
    offset = struct.unpack_from("<H", head, entry)[0] if entry < last else 0
    position = struct.unpack_from("<q", head, root + offset)[0] if offset else -1
    return position if position >= 0 else None
