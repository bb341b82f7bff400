"""What torch.distributed.checkpoint writes and reads: the pieces of global tensors that this rank holds.

A save writes every element of every global tensor exactly once, whichever ranks hold it; that is checked
before the first byte is written. A load reads the saved boxes that overlap what a rank holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megasnn.checkpoint.pieces import COPY, SavedPiece, SavedTensor, covers_once
from megasnn.files.problems import CheckpointError
from megasnn.sharding import ShardedTensor


def copy_name(entry: ShardedTensor) -> str:
    """Under which name the copy of a whole tensor is stored that is meant for this tensor-parallel rank alone.

    A checkpoint laid out for certain ranks may hold such copies, so that each rank finds all it needs in one file.
    """
    place = entry.shard.place
    return f"{COPY}{place.index('tensor')}/{place.size('tensor')}.{entry.name}"


def boxes_of(entry: ShardedTensor) -> Iterator[tuple[MetadataIndex, ChunkStorageMetadata, Tensor]]:
    """The pieces of one tensor: where each lies in the global tensor, and its view of the local memory."""
    for piece in entry.shard.pieces():
        chunk = ChunkStorageMetadata(torch.Size(piece.global_offset), torch.Size(piece.sizes))
        yield MetadataIndex(entry.name, piece.global_offset), chunk, piece.of_local(entry.tensor.detach())


class PieceSavePlanner(SavePlanner):
    """Writes the given tensors' pieces, from the one rank that answers for each element.

    Args:
        entries: what this rank holds.
        names: every tensor that the ranks together must write.
    """

    def __init__(self, entries: Iterable[ShardedTensor], names: Collection[str]) -> None:
        self._names = names
        self._views: dict[MetadataIndex, Tensor] = {}
        self._items: list[WriteItem] = []
        for entry in entries:
            if entry.shard.is_primary():
                self._add(entry)

    def _add(self, entry: ShardedTensor) -> None:
        size = torch.Size(entry.shard.global_shape)
        for index, chunk, view in boxes_of(entry):
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(view), size)
            self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            self._views[index] = view

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Everything is known from the constructor; the state dict handed through is empty."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        items = (item for plan in all_plans for item in plan.items)
        problems = [f"{name}: no rank writes it" for name in self._names if name not in metadata.state_dict_metadata]
        if problems := [*problems, *_disagreements(items, metadata), *_cover_problems(metadata)]:
            raise CheckpointError(*problems)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._views[write_item.index]


def _disagreements(items: Iterable[WriteItem], metadata: Metadata) -> Iterator[str]:
    for item in items:
        saved, mine = metadata.state_dict_metadata[item.index.fqn], item.tensor_data
        assert isinstance(saved, TensorStorageMetadata) and mine is not None
        if (saved.size, saved.properties.dtype) != (mine.size, mine.properties.dtype):
            yield (
                f"{item.index.fqn}: one rank describes it as {list(saved.size)} {saved.properties.dtype}, "
                f"another as {list(mine.size)} {mine.properties.dtype}"
            )


def _cover_problems(metadata: Metadata) -> Iterator[str]:
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        written, needed = sum(prod(chunk.sizes) for chunk in tensor.chunks), prod(tensor.size)
        if not covers_once(tensor.size, [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]):
            yield f"{name}: the ranks would write {written} elements of {needed}, or the same ones twice"


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
        for piece in tensor.pieces:
            for _, chunk, view in boxes_of(entry):
                wanted += _common(tensor, piece, chunk, view)
    if problems:
        raise CheckpointError(*problems)
    return wanted


def _common(tensor: SavedTensor, piece: SavedPiece, box: ChunkStorageMetadata, view: Tensor) -> Iterator[Slice]:
    """What a saved piece and a box of the same tensor have in common, if anything."""
    starts = [max(pair) for pair in zip(piece.offsets, box.offsets, strict=True)]
    ends = [min(a + m, b + n) for a, m, b, n in zip(piece.offsets, piece.sizes, box.offsets, box.sizes, strict=True)]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return
    for dim, (start, end, offset) in enumerate(zip(starts, ends, box.offsets, strict=True)):
        view = view.narrow(dim, start - offset, end - start)
    yield Slice(tensor, piece, tuple(a - b for a, b in zip(starts, piece.offsets, strict=True)), view)
