"""Checksums of parts make the checksum of the whole, and blocks are summed up as they are written."""

from __future__ import annotations

import zlib

from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.checkpoint.checksum import BLOCK, block_lengths, file_checksum, joined
from megasnn.checkpoint.piece_file import block_checksums
from megasnn.files.described import open_regular


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=300), max_size=8))
def test_the_sum_of_parts_is_that_of_the_whole(parts):
    assert joined((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(b"".join(parts))


def test_blocks_are_summed_up_over_the_parts_of_a_piece(tmp_path):
    parts = [b"h" * 100, bytes(range(256)) * (BLOCK // 100), b"", b"t" * 50]
    piece = b"".join(parts)
    sums = block_checksums([memoryview(part) for part in parts])
    assert block_lengths(len(piece)) == [BLOCK, BLOCK, len(piece) - 2 * BLOCK]
    assert sums == tuple(zlib.crc32(piece[at : at + BLOCK]) for at in range(0, len(piece), BLOCK))
    assert block_checksums([memoryview(piece)[:BLOCK]]) == sums[:1] and block_checksums([]) == ()
    assert joined(zip(sums, block_lengths(len(piece)), strict=True)) == zlib.crc32(piece)
    (tmp_path / "file").write_bytes(piece)
    with open_regular(tmp_path / "file") as stream:
        assert file_checksum(stream) == zlib.crc32(piece)
