"""The data files of a checkpoint: torch.distributed.checkpoint's format, each block of each piece with a checksum.

A file holds pieces one after the other, each as `torch.save` writes a tensor, so that torch's own reader understands
them. Where they lie, and the checksums, is in `.metadata`; our reader goes straight to the bytes it needs, and takes
no byte that it has not checked.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization

from megasnn.checkpoint.checksum import BLOCK, ChecksummedFile, block_lengths, joined
from megasnn.checkpoint.errors import DamagedError

DCP_METADATA = ".metadata"


@dataclass(frozen=True)
class SavedPiece:
    """Where one saved box of a tensor lies.

    Attributes:
        file, offset, length: its bytes.
        checksums: CRC-32 of each block of them.
        data: where in these bytes the elements begin, in C order; None for a piece too small to be read in parts.
    """

    file: str
    offset: int
    length: int
    checksums: tuple[int, ...]
    data: int | None

    def as_storage_info(self) -> _StorageInfo:
        info = _StorageInfo(self.file, self.offset, self.length)
        # Torch pickles whatever attributes there are, and its own reader does not look at these.
        info.__dict__.update(crc32=self.checksums, data=self.data)
        return info

    @classmethod
    def of(cls, info: Any) -> SavedPiece:
        """Raises DamagedError when the description was not written here."""
        try:
            return cls(info.relative_path, info.offset, info.length, info.crc32, info.__dict__.get("data"))
        except AttributeError:
            raise DamagedError(f"{DCP_METADATA} has no checksums: megasnn did not write it") from None


class PieceWriter(FileSystemWriter):
    """Writes one file for each rank that has something to write; the others leave no empty file behind."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: Future[list[WriteResult]] = Future()
        name = f"{plan.storage_data.prefix if plan.storage_data else ''}0.distcp"
        results.set_result(self._write_file(name, plan.items, planner) if plan.items else [])
        return results

    def _write_file(self, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        with open(Path(self.path) / name, "wb") as file:
            stream = ChecksummedFile(file)
            results = [_write(stream, name, item, planner.resolve_data(item)) for item in items]
            file.flush()
            os.fsync(file.fileno())
        return results


def _write(stream: ChecksummedFile, name: str, item: WriteItem, tensor: Tensor | io.BytesIO) -> WriteResult:
    assert isinstance(tensor, Tensor)
    values = tensor.cpu().contiguous()
    if values.untyped_storage().nbytes() != values.nbytes:
        values = values.clone()  # torch.save would write the whole tensor that this is a part of
    offset = stream.position
    stream.begin_piece()
    with serialization.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
        torch.save(values, stream)  # type: ignore[arg-type]
    data = stream.largest_write() if values.nbytes > BLOCK else None
    piece = SavedPiece(name, offset, stream.position - offset, stream.checksums(), data)
    return WriteResult(item.index, piece.length, piece.as_storage_info())


def saved_pieces(metadata: Metadata) -> dict[str, list[SavedPiece]]:
    """All pieces of each file, in their order."""
    pieces: dict[str, list[SavedPiece]] = {}
    for piece in map(SavedPiece.of, metadata.storage_data.values()):
        pieces.setdefault(piece.file, []).append(piece)
    return {name: sorted(found, key=lambda piece: piece.offset) for name, found in sorted(pieces.items())}


def file_checksum_of(pieces: Iterable[SavedPiece]) -> int:
    """The CRC-32 of the file that consists of these pieces."""
    parts = (zip(piece.checksums, block_lengths(piece.length), strict=True) for piece in pieces)
    return joined(part for blocks in parts for part in blocks)


def read_dcp_metadata(path: Path, checksum: int) -> Metadata:
    """`.metadata` of one checkpoint. Raises DamagedError when it is not what was written."""
    file = path / DCP_METADATA
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DamagedError(f"cannot read {file}: {error}") from None
    if zlib.crc32(content) != checksum:  # before it is unpickled
        raise DamagedError(f"{file} was altered: its checksum differs")
    return pickle.loads(content)


class PieceReader:
    """Reads slices of saved pieces; one buffer serves for all of them."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder, self._metadata = folder, metadata
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, wanted: Iterable[tuple[ReadItem, Tensor]]) -> None:
        """Copies each item's slice into its tensor.

        Raises:
            DamagedError: bytes are missing or altered; names file and tensor. What was read before has been copied.
        """
        for name, parts in self._by_file(wanted).items():
            file = self._folder / name
            try:
                with open(file, "rb", buffering=0) as stream:
                    for piece, item, target in parts:
                        self._read_slice(stream, piece, item, target)
            except OSError as error:
                raise DamagedError(f"cannot read {file}: {error}") from None

    def damage(self, name: str, pieces: Iterable[SavedPiece]) -> Iterator[tuple[int, str | None]]:
        """Reads pieces of one file: for each its bytes, and what is wrong with them."""
        try:
            with open(self._folder / name, "rb", buffering=0) as stream:
                for piece in pieces:
                    try:
                        self._checked(stream, piece, 0, piece.length, str(self._folder / name))
                        yield piece.length, None
                    except DamagedError as error:
                        yield piece.length, str(error)
        except OSError as error:
            yield 0, f"cannot read {self._folder / name}: {error}"

    def _by_file(
        self, wanted: Iterable[tuple[ReadItem, Tensor]]
    ) -> Mapping[str, list[tuple[SavedPiece, ReadItem, Tensor]]]:
        files: dict[str, list[tuple[SavedPiece, ReadItem, Tensor]]] = {}
        for item, target in wanted:
            piece = SavedPiece.of(self._metadata.storage_data[item.storage_index])
            files.setdefault(piece.file, []).append((piece, item, target))
        for parts in files.values():
            parts.sort(key=lambda part: part[0].offset)
        return files

    def _read_slice(self, stream: io.FileIO, piece: SavedPiece, item: ReadItem, target: Tensor) -> None:
        saved = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(saved, TensorStorageMetadata) and item.storage_index.index is not None
        name = f"{item.storage_index.fqn} in {self._folder / piece.file}"
        if piece.data is None:
            content = self._checked(stream, piece, 0, piece.length, name)
            values = torch.load(io.BytesIO(content.numpy().data), map_location="cpu", weights_only=True)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                values = values.narrow(dim, start, length)
        else:
            sizes, dtype = saved.chunks[item.storage_index.index].sizes, saved.properties.dtype
            strides = [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
            first = sum(start * stride for start, stride in zip(item.storage_offsets, strides, strict=True))
            last = first + sum((n - 1) * stride for n, stride in zip(item.lengths, strides, strict=True))
            begin, end = (piece.data + index * dtype.itemsize for index in (first, last + 1))
            flat = self._checked(stream, piece, begin, end, name).view(dtype)
            values = flat.as_strided(tuple(item.lengths), strides)
        target.copy_(values)

    def _checked(self, stream: io.FileIO, piece: SavedPiece, begin: int, end: int, name: str) -> Tensor:
        """These bytes of a piece, uint8, from whole blocks that have been checked."""
        start = begin - begin % BLOCK
        stop = min(piece.length, end + -end % BLOCK)
        if self._buffer.numel() < stop - start:
            self._buffer = torch.empty(stop - start, dtype=torch.uint8)
        memory = memoryview(self._buffer.numpy().data)
        stream.seek(piece.offset + start)
        for at in range(start, stop, BLOCK):
            block = memory[at - start : min(at + BLOCK, stop) - start]
            if _fill(stream, block) < len(block):
                raise DamagedError(f"{name}: the file ends too early")
            if zlib.crc32(block) != piece.checksums[at // BLOCK]:
                raise DamagedError(f"{name} was altered: the checksum of bytes {piece.offset + at}... differs")
        return self._buffer[begin - start : end - start]


def _fill(stream: io.FileIO, memory: memoryview) -> int:
    """Reads until the memory is full or the file ends; the number of bytes read."""
    count = 0
    while count < len(memory) and (more := stream.readinto(memory[count:])):
        count += more
    return count
