"""AEDAT 4, as DV writes it: compressed packets of several streams, decoded by the optional package aedat.

A first line is followed by a header (its size, then a FlatBuffers table with the compression, the position of the table
of packets, and a description of the streams in XML), by packets (stream and size, then data), and by the table of
packets. All of it is checked here before the decoder sees it, because that takes a cut file for a whole one and
allocates what packets declare. LZ4 and Zstandard cut data into blocks that say, or bound, what they unpack to, so this
is known without unpacking; the sizes that their frames declare are not needed for it, and could be anything.

Sources: the AEDAT 4.0 format page of inivation; the LZ4 frame format 1.6.4; RFC 8878 (Zstandard), section 3.1.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from xml.etree import ElementTree

import numpy as np

from megasnn.events.recording import Decoded, Events, RecordingError, SensorSize
from megasnn.files.sample_size import SAMPLE_BYTES, too_large

_LZ4, _ZSTD = 0x184D2204, 0xFD2FB528
_SKIPPABLE, _SKIPPABLE_MASK = 0x184D2A50, 0xFFFFFFF0
_LZ4_MOST = 255  # bytes that one byte of a compressed block can become
_ZSTD_BLOCK = 128 << 10
_RAW, _RUN = 0, 1


def _as_it_is(data: bytes, start: int, end: int) -> int:
    return end - start


def _frames(
    magic: int, frame: Callable[[bytes, int, int], tuple[int, int]], data: bytes, position: int, end: int
) -> int:
    """The most that frames of one format unpack to. `frame` gives that of one, and where the next one begins."""
    total = 0
    while position < end:
        (found,) = struct.unpack_from("<I", data, position)
        position += 4
        if found & _SKIPPABLE_MASK == _SKIPPABLE:
            position += 4 + struct.unpack_from("<I", data, position)[0]
        elif found != magic:
            raise ValueError(f"a frame begins with {found:#x} instead of {magic:#x}")
        else:
            size, position = frame(data, position, end)
            total += size
    return total


def _lz4_frame(data: bytes, position: int, end: int) -> tuple[int, int]:
    total, flags, largest = 0, data[position], 1 << 8 + 2 * (data[position + 1] >> 4 & 7)
    position += 3 + 8 * (flags >> 3 & 1) + 4 * (flags & 1)
    while size := struct.unpack_from("<I", data, position)[0]:
        raw, size = size >> 31, size & 0x7FFF_FFFF
        total += size if raw else min(largest, _LZ4_MOST * size)
        position += 4 + size + 4 * (flags >> 4 & 1)
    return total, position + 4 + 4 * (flags >> 2 & 1)


def _zstd_frame(data: bytes, position: int, end: int) -> tuple[int, int]:
    total, last, flags = 0, 0, data[position]
    one_segment = flags >> 5 & 1
    position += 1 + (1 - one_segment) + (0, 1, 2, 4)[flags & 3] + (one_segment, 2, 4, 8)[flags >> 6]
    while not last:
        header = int.from_bytes(data[position : position + 3], "little")
        if position + 3 > end:
            raise ValueError("it ends inside a frame")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        total += size if kind in (_RAW, _RUN) else _ZSTD_BLOCK
        position += 3 + (1 if kind == _RUN else size)
    return total, position + 4 * (flags >> 2 & 1)


_lz4, _zstd = partial(_frames, _LZ4, _lz4_frame), partial(_frames, _ZSTD, _zstd_frame)
UNPACKED_SIZES: dict[int, Callable[[bytes, int, int], int]] = {0: _as_it_is, 1: _lz4, 2: _lz4, 3: _zstd, 4: _zstd}
"""By the number of the compression in a file's header: (data, first byte, end) -> the most that it unpacks to."""


MAGIC = b"#!AER-DAT4.0\r\n"
_COMPRESSION_FIELD, _TABLE_FIELD, _TEXT_FIELD = 0, 1, 2


def check_packets(data: bytes, name: str, limit: int) -> None:
    """Raises RecordingError where the header makes no sense, packets do not fill the space up to their table, or may
    unpack to more bytes than `limit`: the decoder allocates what they declare."""
    if not data:
        raise RecordingError(name, "is empty (0 bytes)")
    if not data.startswith(MAGIC):
        raise RecordingError(name, f"is not AEDAT 4.0 (begins with {data[: len(MAGIC)]!r})")
    try:
        (size,) = struct.unpack_from("<I", data, len(MAGIC))
        header = memoryview(data)[len(MAGIC) + 4 : len(MAGIC) + 4 + size]
        table = _table_position(header)
        unpacked = UNPACKED_SIZES[_compression(header)]
        _check_text(_text(header))
    except (struct.error, ValueError, LookupError, SyntaxError, RecursionError) as error:
        raise RecordingError(name, f"has a header that is cut or damaged ({error})") from error
    if table is not None and table >= len(data):
        raise RecordingError(
            name, f"is cut: its table of packets begins at byte {table}, the file ends at byte {len(data)}"
        )
    total = 0
    end = len(data) if table is None else table
    for start, stop in _packets(data, len(MAGIC) + 4 + size, end, name):
        try:
            total += unpacked(data, start, stop)
        except (struct.error, IndexError, ValueError) as error:
            raise RecordingError(name, f"the packet at byte {start - 8} is cut or damaged ({error})") from error
        if problem := too_large("its packets", total, limit):
            raise RecordingError(name, problem)


def _field(header: memoryview, number: int) -> int | None:
    """Where a field of the FlatBuffers table is; None where it has its default."""
    (root,) = struct.unpack_from("<I", header)
    (back,) = struct.unpack_from("<i", header, root)
    entry = root - back + 4 + 2 * number  # two sizes, then the offset of each field
    (size,) = struct.unpack_from("<H", header, _inside(root - back))
    (offset,) = struct.unpack_from("<H", header, entry) if 4 + 2 * number < size else (0,)
    return root + offset if offset else None


def _inside(position: int) -> int:
    """Negative positions would count from the end."""
    if position < 0:
        raise struct.error(f"an offset leads to position {position}")
    return position


def _compression(header: memoryview) -> int:
    place = _field(header, _COMPRESSION_FIELD)
    (compression,) = (0,) if place is None else struct.unpack_from("<i", header, place)
    return int(compression)


def _table_position(header: memoryview) -> int | None:
    """None where the program that recorded did not come to write it."""
    place = _field(header, _TABLE_FIELD)
    (position,) = (-1,) if place is None else struct.unpack_from("<q", header, place)
    return position if position >= 0 else None


def _text(header: memoryview) -> str:
    place = _field(header, _TEXT_FIELD)
    if place is None:
        raise struct.error("it does not describe its streams")
    start = place + struct.unpack_from("<I", header, place)[0]
    (length,) = struct.unpack_from("<I", header, start)
    return str(header[start + 4 : start + 4 + length], "utf-8")


def _check_text(text: str) -> None:
    """Raises ValueError or SyntaxError unless it is XML without definitions of its own, which could be without end."""
    if "<!" in text:
        raise ValueError("its description of streams has definitions")
    ElementTree.fromstring(text)


def _packets(data: bytes, position: int, end: int, name: str) -> Iterator[tuple[int, int]]:
    """Where the content of each packet begins and ends. Raises RecordingError where they do not fill the space."""
    while position < end:
        if position + 8 > end:
            raise RecordingError(name, f"is cut: the header of the packet at byte {position} is not complete")
        _, size = struct.unpack_from("<ii", data, position)
        left = end - position - 8
        if not 0 <= size <= left:
            raise RecordingError(
                name, f"the packet at byte {position} should have {size} bytes, {left} are left: cut or damaged"
            )
        yield position + 8, position + 8 + size
        position += 8 + size


def read_aedat4(data: bytes, path: str, sensor: SensorSize | None = None, limit: int = SAMPLE_BYTES) -> Decoded:
    """Reads the event stream of an AEDAT 4 file; frames, triggers and the motion sensor's data are left out.

    Args:
        data: the whole file, for the checks.
        path: of the file, for the decoder, which takes nothing else and reads the file again: it must not change.
        sensor: by default what the file says.
        limit: bytes that its packets may unpack to.

    Raises:
        RecordingError: cut, damaged, empty, too large, another format, no event stream or more than one.
        ModuleNotFoundError: the package aedat is not installed.
    """
    try:
        import aedat
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path}: AEDAT 4 files are read with the package aedat: pip install megasnn[events]", name="aedat"
        ) from error
    check_packets(data, path, limit)
    packets: list[np.ndarray] = []
    try:
        decoder = aedat.Decoder(path)
        stream = _event_stream(decoder.id_to_stream(), path)
        packets.extend(packet["events"] for packet in decoder if "events" in packet)
    except RecordingError:
        raise
    except BaseException as error:
        # What its Rust code panics about is no Exception.
        if not isinstance(error, RuntimeError) and type(error).__name__ != "PanicException":
            raise
        done = sum(len(packet) for packet in packets)
        raise RecordingError(path, f"cannot be decoded after event {done} ({error})") from error
    if not packets:
        raise RecordingError(path, "has no events")
    raw = np.concatenate(packets)
    events = Events.make(raw["t"], raw["x"], raw["y"], raw["on"])
    return Decoded(events, sensor or SensorSize(stream["height"], stream["width"]), "aedat4")


def _event_stream(streams: dict[int, dict[str, Any]], path: str) -> dict[str, Any]:
    found = [stream for stream in streams.values() if stream["type"] == "events"]
    if len(found) != 1:
        raise RecordingError(path, f"has {len(found)} event streams; exactly one can be read")
    return found[0]
