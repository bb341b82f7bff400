"""Checksums of parts make the checksum of the whole, and blocks are summed up as they are written."""

from __future__ import annotations

import io
import zlib

from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.checkpoint.checksum import BLOCK, ChecksummedFile, block_lengths, file_checksum, joined
from megasnn.files.described import open_regular


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=300), max_size=8))
def test_the_sum_of_parts_is_that_of_the_whole(parts):
    assert joined((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(b"".join(parts))


def test_blocks_are_counted_from_the_beginning_of_each_piece(tmp_path):
    file = io.BytesIO()
    stream = ChecksummedFile(file)
    stream.write(b"before")
    stream.begin_piece()
    large = bytes(range(256)) * (BLOCK // 100)
    for part in (b"h" * 100, large, b"t" * 50):
        stream.write(part)
    piece = b"h" * 100 + large + b"t" * 50
    assert file.getvalue() == b"before" + piece and stream.position == len(file.getvalue())
    assert stream.largest_write() == 100
    assert block_lengths(len(piece)) == [BLOCK, BLOCK, len(piece) - 2 * BLOCK]
    assert stream.checksums() == tuple(zlib.crc32(piece[at : at + BLOCK]) for at in range(0, len(piece), BLOCK))
    assert joined(zip(stream.checksums(), block_lengths(len(piece)), strict=True)) == zlib.crc32(piece)
    (tmp_path / "file").write_bytes(piece)
    with open_regular(tmp_path / "file") as stream:
        assert file_checksum(stream) == zlib.crc32(piece)
