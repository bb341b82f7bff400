"""Reads the data files of a checkpoint: torch.distributed.checkpoint's format, a checksum for each block of each piece.

A file holds pieces one after the other, each as `torch.save` writes a tensor, so that torch's own reader understands
them. Where they lie, and the checksums, is in `pieces.json`; our reader goes straight to the bytes it needs, and takes
no byte that it has not checked.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megasnn.checkpoint.checksum import BLOCK
from megasnn.checkpoint.pieces import SavedPiece, SavedTensor
from megasnn.checkpoint.planner import Slice
from megasnn.checkpoint.torch_frame import values_at
from megasnn.files.described import open_within
from megasnn.files.problems import DamagedError

_WINDOW = 64 * BLOCK


class PieceReader:
    """Reads slices of saved pieces of one checkpoint; one buffer serves for all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, wanted: Iterable[Slice]) -> None:
        """Copies each slice into its tensor.

        Raises:
            DamagedError: bytes are missing or altered; names file and tensor. What was read before has been copied.
        """
        files: dict[str, list[Slice]] = {}
        for part in wanted:
            files.setdefault(part.piece.file, []).append(part)
        for name, parts in files.items():
            try:
                with open_within(self._folder, name) as stream:
                    for part in sorted(parts, key=lambda part: part.piece.position):
                        self._read_slice(stream, part)
            except OSError as error:
                raise DamagedError(f"cannot read {self._folder / name}: {error}") from None

    def damage(self, name: str, pieces: Iterable[tuple[SavedPiece, SavedTensor]]) -> Iterator[tuple[int, str | None]]:
        """Reads pieces of one file: for each its bytes, and what is wrong with them."""
        try:
            with open_within(self._folder, name) as stream:
                for piece, tensor in pieces:
                    try:
                        for begin in range(0, piece.length, _WINDOW):
                            end = min(begin + _WINDOW, piece.length)
                            self._checked(stream, piece, begin, end, str(self._folder / name))
                        self._values_of(stream, piece, tensor)
                        yield piece.length, None
                    except DamagedError as error:
                        yield piece.length, str(error)
        except OSError as error:
            yield 0, f"cannot read {self._folder / name}: {error}"

    def _values_of(self, stream: io.FileIO, piece: SavedPiece, tensor: SavedTensor) -> int:
        """Where in the piece the values begin."""
        if piece.values is not None:
            return piece.values
        name = f"{tensor.name} in {self._folder / piece.file}"
        content = self._checked(stream, piece, 0, piece.length, name)
        try:
            item = tensor.torch_dtype.itemsize
            return values_at(bytes(content.numpy().data), prod(piece.sizes) * item, item)
        except DamagedError as error:
            raise DamagedError(f"{name}: {error}") from None

    def _read_slice(self, stream: io.FileIO, part: Slice) -> None:
        piece, sizes, dtype = part.piece, part.piece.sizes, part.tensor.torch_dtype
        strides = [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
        first = sum(start * stride for start, stride in zip(part.start, strides, strict=True))
        last = first + sum((n - 1) * stride for n, stride in zip(part.target.shape, strides, strict=True))
        values = self._values_of(stream, piece, part.tensor)
        begin, end = (values + index * dtype.itemsize for index in (first, last + 1))
        flat = self._checked(stream, piece, begin, end, f"{part.tensor.name} in {self._folder / piece.file}")
        part.target.copy_(flat.view(dtype).as_strided(tuple(part.target.shape), strides))

    def _checked(self, stream: io.FileIO, piece: SavedPiece, begin: int, end: int, name: str) -> Tensor:
        """These bytes of a piece, uint8, from whole blocks that have been checked."""
        start = begin - begin % BLOCK
        stop = min(piece.length, end + -end % BLOCK)
        if self._buffer.numel() < stop - start:
            self._buffer = torch.empty(stop - start, dtype=torch.uint8)
        memory = memoryview(self._buffer.numpy().data)
        stream.seek(piece.position + start)
        for at in range(start, stop, BLOCK):
            block = memory[at - start : min(at + BLOCK, stop) - start]
            if _fill(stream, block) < len(block):
                raise DamagedError(f"{name}: the file ends too early")
            if zlib.crc32(block) != piece.checksum(at // BLOCK):
                raise DamagedError(f"{name} was altered: the checksum of bytes {piece.position + at}... differs")
        return self._buffer[begin - start : end - start]


def _fill(stream: io.FileIO, memory: memoryview) -> int:
    """Reads until the memory is full or the file ends; the number of bytes read."""
    count = 0
    while count < len(memory) and (more := stream.readinto(memory[count:])):
        count += more
    return count
