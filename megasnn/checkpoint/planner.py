"""Which pieces of global tensors a rank's file holds, what all files hold together, and which pieces a load reads.

A save writes every element of every global tensor exactly once, whichever ranks hold it; that is checked
before the first byte is written. A load reads the saved boxes that overlap what a rank holds.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megasnn.checkpoint.complete import Content, file_name
from megasnn.checkpoint.pieces import COPY, SavedPiece, SavedTensor, covers_once
from megasnn.checkpoint.raw import bytes_of
from megasnn.checkpoint.torch_frame import torch_frame
from megasnn.files.problems import CheckpointError
from megasnn.sharded_tensors import ShardedTensor
from megasnn.sharding import Piece


def copy_name(entry: ShardedTensor) -> str:
    """Under which name the copy of a whole tensor is stored that is meant for this tensor-parallel rank alone.

    A checkpoint laid out for certain ranks may hold such copies, so that each rank finds all it needs in one file.
    """
    place = entry.shard.place
    return f"{COPY}{place.index('tensor')}/{place.size('tensor')}.{entry.name}"


def pieces_of(entries: Iterable[ShardedTensor], rank: int) -> list[SavedTensor]:
    """What this rank's file holds of these tensors, one piece after the other, still without checksums."""
    file, position, held = file_name(rank), 0, []
    for entry in entries:
        dtype, pieces = entry.tensor.dtype, []
        for piece in entry.shard.pieces():
            before, after = torch_frame(piece.sizes, dtype)
            length = len(before) + prod(piece.sizes) * dtype.itemsize + len(after)
            pieces.append(SavedPiece(piece.global_offset, piece.sizes, file, position, length, "", len(before)))
            position += length
        held.append(SavedTensor(entry.name, entry.shard.global_shape, f"{dtype}".removeprefix("torch."), tuple(pieces)))  # type: ignore[arg-type]
    return held


def pieces_in_memory(entry: ShardedTensor) -> list[Tensor]:
    """The pieces of one tensor, as views of the local one."""
    return [piece.of_local(entry.tensor.detach()) for piece in entry.shard.pieces()]


def parts_of(values: Tensor) -> list[memoryview]:
    """What a piece with these values consists of, in a file."""
    before, after = torch_frame(tuple(values.shape), values.dtype)
    return [memoryview(before), bytes_of(values.cpu()), memoryview(after)]


def content_of(ranks: Iterable[Sequence[SavedTensor]], names: Collection[str]) -> Content:
    """What the ranks' files hold together.

    Args:
        ranks: what each rank's file holds.
        names: every tensor that the ranks together must write.
    Raises:
        CheckpointError: a tensor is written by no rank, in part, twice, or with different descriptions (names all).
    """
    first: dict[str, SavedTensor] = {}
    pieces: dict[str, list[SavedPiece]] = {}
    problems = []
    for mine in (tensor for held in ranks for tensor in held):
        saved = first.setdefault(mine.name, mine)
        if (saved.shape, saved.dtype) != (mine.shape, mine.dtype):
            problems.append(
                f"{mine.name}: one rank describes it as {list(saved.shape)} {saved.torch_dtype}, "
                f"another as {list(mine.shape)} {mine.torch_dtype}"
            )
        pieces.setdefault(mine.name, []).extend(mine.pieces)
    found = {name: replace(tensor, pieces=tuple(pieces[name])) for name, tensor in first.items()}
    problems += [f"{name}: no rank writes it" for name in names if name not in found]
    for name, tensor in found.items():
        if not covers_once(tensor.shape, [(piece.offsets, piece.sizes) for piece in tensor.pieces]):
            written, needed = sum(prod(piece.sizes) for piece in tensor.pieces), prod(tensor.shape)
            problems.append(f"{name}: the ranks would write {written} elements of {needed}, or the same ones twice")
    if problems:
        raise CheckpointError(*problems)
    return Content(tuple(found[name] for name in sorted(found)), _for_torch(found.values()))


def _for_torch(tensors: Iterable[SavedTensor]) -> bytes:
    """What torch.distributed.checkpoint keeps in `.metadata` of these tensors."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for tensor in tensors:
        boxes = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in tensor.pieces]
        properties = TensorProperties(tensor.torch_dtype)
        described[tensor.name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), boxes)
        for number, piece in enumerate(tensor.pieces):
            index = MetadataIndex(tensor.name, torch.Size(piece.offsets), number)
            places[index] = _StorageInfo(piece.file, piece.position, piece.length)
    return pickle.dumps(Metadata(described, storage_data=places, version=CURRENT_DCP_VERSION))


@dataclass(frozen=True)
class Slice:
    """Part of a saved piece, from `start` on (an entry for each dimension), and the memory that it goes to."""

    tensor: SavedTensor
    piece: SavedPiece
    start: tuple[int, ...]
    target: Tensor


def plan_reading(entries: Iterable[ShardedTensor], saved: Mapping[str, SavedTensor]) -> list[Slice]:
    """Which slices of which saved pieces go where in the given tensors' memory.

    Raises:
        CheckpointError: there is no such tensor, or it has another shape (names all such).
    """
    wanted: list[Slice] = []
    problems = []
    for entry in entries:
        name = entry.name
        if not entry.shard.is_primary(["tensor"]) and copy_name(entry) in saved:
            name = copy_name(entry)
        tensor = saved.get(name)
        if tensor is None or tensor.shape != entry.shard.global_shape:
            problems.append(f"{name}: the files hold no tensor of shape {list(entry.shard.global_shape)}")
            continue
        boxes = entry.shard.pieces()
        for piece in _touching(tensor.pieces, boxes):
            for box in boxes:
                wanted += _common(tensor, piece, box, entry.tensor.detach())
    if problems:
        raise CheckpointError(*problems)
    return wanted


def _touching(pieces: Sequence[SavedPiece], boxes: Sequence[Piece]) -> Sequence[SavedPiece]:
    """Of many pieces those that have something in common with one of the boxes, in their order. Compared one by one,
    the pieces of thousands of ranks would take minutes."""
    if len(pieces) < 2:
        return pieces
    starts, sizes = (np.array([getattr(piece, name) for piece in pieces]) for name in ("offsets", "sizes"))
    found = np.zeros(len(pieces), bool)
    for box in boxes:
        first = np.array(box.global_offset)
        found |= ((starts < first + box.sizes) & (first < starts + sizes)).all(1)
    return [pieces[number] for number in np.flatnonzero(found).tolist()]


def _common(tensor: SavedTensor, piece: SavedPiece, box: Piece, local: Tensor) -> Iterator[Slice]:
    """What a saved piece and a box of the same tensor have in common, if anything."""
    starts = [max(pair) for pair in zip(piece.offsets, box.global_offset, strict=True)]
    saved_and_held = zip(piece.offsets, piece.sizes, box.global_offset, box.sizes, strict=True)
    ends = [min(a + m, b + n) for a, m, b, n in saved_and_held]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return
    view = box.of_local(local)
    for dim, (start, end, offset) in enumerate(zip(starts, ends, box.global_offset, strict=True)):
        view = view.narrow(dim, start - offset, end - start)
    yield Slice(tensor, piece, tuple(a - b for a, b in zip(starts, piece.offsets, strict=True)), view)
