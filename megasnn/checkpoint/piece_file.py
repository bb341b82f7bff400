"""A data file of a checkpoint while it is written: pieces one after the other, each block of them with a checksum.

It knows bytes only, no tensors: the process that writes beside training does without torch.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from megasnn.checkpoint.checksum import BLOCK

Parts = Sequence[memoryview]
Span = tuple[int, int]
_BYTES_A_CALL = 4 * BLOCK  # a converter has them in memory for this call only
_BUFFERS_A_CALL = 999  # POSIX systems take 1024 (IOV_MAX), and a piece has three


def write_pieces_file(path: Path, pieces: Iterable[Parts]) -> list[str]:
    """Writes a file, safely on disk. Raises OSError.

    Args:
        pieces: what each piece consists of. It must stay as it is until the file is written: several go together.
    Returns:
        the CRC-32 of each block of each piece, eight hexadecimal digits for each.
    """
    checksums: list[str] = []
    with open(path, "wb", buffering=0) as stream:
        waiting: list[memoryview] = []
        for parts in pieces:
            checksums.append("".join(f"{checksum:08x}" for checksum in block_checksums(parts)))
            waiting += parts
            if sum(map(len, waiting)) > _BYTES_A_CALL or len(waiting) > _BUFFERS_A_CALL:
                _write_all(stream.fileno(), waiting)
                waiting = []
        _write_all(stream.fileno(), waiting)
        os.fsync(stream.fileno())
    return checksums


def write_shared(path: Path, descriptor: int, spans: Iterable[Span]) -> list[str]:
    """`write_pieces_file` of pieces that lie in shared memory, each with its offset and length."""
    memory = _mapped(descriptor)
    return write_pieces_file(path, ([memory[begin : begin + length]] for begin, length in spans))


@lru_cache
def _mapped(descriptor: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))


def _write_all(descriptor: int, parts: Parts) -> None:
    waiting = [part for part in parts if part]
    while waiting:
        done = os.writev(descriptor, waiting)
        while waiting and done >= len(waiting[0]):
            done -= len(waiting.pop(0))
        if done:
            waiting[0] = waiting[0][done:]


def block_checksums(parts: Sequence[memoryview]) -> tuple[int, ...]:
    """The CRC-32 of each block of what these parts are together; the last block is as short as it is."""
    sums, checksum, room = [], 0, BLOCK
    for part in parts:
        while part:
            now, part = part[:room], part[room:]
            checksum, room = zlib.crc32(now, checksum), room - len(now)
            if not room:
                sums.append(checksum)
                checksum, room = 0, BLOCK
    return (*sums, checksum) if room < BLOCK else tuple(sums)
