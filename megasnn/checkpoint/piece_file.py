"""A data file of a checkpoint while it is written: pieces as `torch.save` writes tensors, each block with a checksum.

It is written in a thread beside training, and both need the interpreter: so what `torch.save` puts around the values of
a tensor is made once for each shape, and many pieces go to the system in one call.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.serialization import config as serialization

from megasnn.checkpoint.checksum import BLOCK
from megasnn.checkpoint.pieces import values_at
from megasnn.checkpoint.raw import bytes_of

_BYTES_A_CALL = 4 * BLOCK  # a converter has them in memory for this call only
_BUFFERS_A_CALL = 999  # POSIX systems take 1024 (IOV_MAX), and a piece has three


@dataclass(frozen=True)
class Place:
    """Where a piece lies.

    Attributes:
        position, length: in the file, bytes.
        values: where in the piece the elements begin.
        checksums: the CRC-32 of each block of the piece, the last one as short as it is.
    """

    position: int
    length: int
    values: int
    checksums: tuple[int, ...]


class PieceFile:
    """Pieces one after the other, to a file that is open for writing; the last ones are there after `flush`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._position = self._waiting_bytes = 0
        self._waiting: list[memoryview] = []

    def add(self, values: Tensor) -> Place:
        """Appends a tensor. Its memory must stay as it is until `flush`."""
        before, after = _around(tuple(values.shape), values.dtype)
        parts = [memoryview(before), bytes_of(values), memoryview(after)]
        length = sum(map(len, parts))
        place = Place(self._position, length, len(before), block_checksums(parts))
        self._position += length
        self._waiting += parts
        self._waiting_bytes += length
        if self._waiting_bytes > _BYTES_A_CALL or len(self._waiting) > _BUFFERS_A_CALL:
            self.flush()
        return place

    def flush(self) -> None:
        """Hands everything to the system. Raises OSError."""
        waiting = [part for part in self._waiting if part]
        self._waiting, self._waiting_bytes = [], 0
        while waiting:
            done = os.writev(self._descriptor, waiting)
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


@lru_cache(maxsize=4096)
def _around(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What `torch.save` writes before and after the values of a tensor of this shape, whichever they are."""
    values = torch.empty(shape, dtype=dtype)  # the system gives no memory to what is not written to
    stream = io.BytesIO() if values.nbytes <= BLOCK else _AroundLargest()
    with serialization.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
        torch.save(values, stream)  # type: ignore[arg-type]
    if isinstance(stream, _AroundLargest):
        return bytes(stream.before), bytes(stream.after)
    content = stream.getvalue()
    begin = values_at(content, values.nbytes, dtype.itemsize)
    return content[:begin], content[begin + values.nbytes :]


class _AroundLargest:
    """A stream that keeps all but the one write of more than a block, which is the values."""

    def __init__(self) -> None:
        self.before, self.after = bytearray(), bytearray()
        self._passed = False

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size > BLOCK:
            self._passed = True
        else:
            (self.after if self._passed else self.before).extend(data)
        return size

    def flush(self) -> None:
        """torch.save calls it."""
