"""How an AEDAT 4 file is laid out: checked here, because the decoder takes a cut file for a whole one.

After the first line come the header (its size, then a FlatBuffers table with the compression, the position of the table
of packets, and a description of the streams in XML), packets (stream and size, then data), and the table of packets.

Source: the AEDAT 4.0 format page of inivation.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from xml.etree import ElementTree

from megasnn.events.events import RecordingError
from megasnn.events.unpacked_size import UNPACKED_SIZES
from megasnn.files.sample_size import too_large

MAGIC = b"#!AER-DAT4.0\r\n"
_COMPRESSION_FIELD, _TABLE_FIELD, _TEXT_FIELD = 0, 1, 2


def check_layout(data: bytes, name: str, limit: int) -> None:
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
