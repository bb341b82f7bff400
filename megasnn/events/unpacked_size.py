"""How large compressed packets of an AEDAT 4 file can become: from the headers of their blocks, without unpacking.

Both formats cut data into blocks that say, or bound, what they unpack to; the sizes that their frames declare are not
needed for it, and could be anything.

Sources: the LZ4 frame format 1.6.4; RFC 8878 (Zstandard), section 3.1.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

_LZ4, _ZSTD = 0x184D2204, 0xFD2FB528
_SKIPPABLE, _SKIPPABLE_MASK = 0x184D2A50, 0xFFFFFFF0
_LZ4_MOST = 255  # bytes that one byte of a compressed block can become
_ZSTD_BLOCK = 128 << 10
_RAW, _RUN = 0, 1


def _as_it_is(data: bytes, start: int, end: int) -> int:
    return end - start


def _lz4(data: bytes, position: int, end: int) -> int:
    total = 0
    while position < end:
        (magic,) = struct.unpack_from("<I", data, position)
        position += 4
        if magic & _SKIPPABLE_MASK == _SKIPPABLE:
            position += 4 + struct.unpack_from("<I", data, position)[0]
            continue
        if magic != _LZ4:
            raise ValueError("no LZ4 frame")
        flags, largest = data[position], 1 << 8 + 2 * (data[position + 1] >> 4 & 7)
        position += 3 + 8 * (flags >> 3 & 1) + 4 * (flags & 1)
        while size := struct.unpack_from("<I", data, position)[0]:
            raw, size = size >> 31, size & 0x7FFF_FFFF
            total += size if raw else min(largest, _LZ4_MOST * size)
            position += 4 + size + 4 * (flags >> 4 & 1)
        position += 4 + 4 * (flags >> 2 & 1)
    return total


def _zstd(data: bytes, position: int, end: int) -> int:
    total = 0
    while position < end:
        (magic,) = struct.unpack_from("<I", data, position)
        position += 4
        if magic & _SKIPPABLE_MASK == _SKIPPABLE:
            position += 4 + struct.unpack_from("<I", data, position)[0]
            continue
        if magic != _ZSTD:
            raise ValueError("no Zstandard frame")
        flags = data[position]
        one_segment = flags >> 5 & 1
        position += 1 + (1 - one_segment) + (0, 1, 2, 4)[flags & 3] + (one_segment, 2, 4, 8)[flags >> 6]
        last = 0
        while not last:
            header = int.from_bytes(data[position : position + 3], "little")
            if position + 3 > end:
                raise ValueError("it ends inside a frame")
            last, kind, size = header & 1, header >> 1 & 3, header >> 3
            total += size if kind in (_RAW, _RUN) else _ZSTD_BLOCK
            position += 3 + (1 if kind == _RUN else size)
        position += 4 * (flags >> 2 & 1)
    return total


UNPACKED_SIZES: dict[int, Callable[[bytes, int, int], int]] = {0: _as_it_is, 1: _lz4, 2: _lz4, 3: _zstd, 4: _zstd}
"""By the number of the compression in a file's header: (data, first byte, end) -> the most that it unpacks to."""
