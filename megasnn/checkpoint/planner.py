"""What torch.distributed.checkpoint writes and reads: the pieces of global tensors that this rank holds.

A save writes every element of every global tensor exactly once, whichever ranks hold it; that is checked
before the first byte is written. A load reads the saved boxes that overlap what a rank holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import combinations
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
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megasnn.checkpoint.errors import CheckpointError
from megasnn.sharding import ShardedTensor

COPY = "copy."


def copy_name(entry: ShardedTensor) -> str:
    """Under which name the copy of a whole tensor is stored that is meant for this tensor-parallel rank alone.

    A checkpoint laid out for certain ranks may hold such copies, so that each rank finds all it needs in one file.
    """
    return f"{COPY}{entry.shard.rank}/{entry.shard.size}.{entry.name}"


def boxes_of(entry: ShardedTensor) -> Iterator[tuple[MetadataIndex, ChunkStorageMetadata, Tensor]]:
    """The pieces of one tensor: where each lies in the global tensor, and its view of the local memory."""
    for piece in entry.shard.pieces():
        chunk = ChunkStorageMetadata(torch.Size(piece.global_offset), torch.Size(piece.sizes))
        yield MetadataIndex(entry.name, piece.global_offset), chunk, piece.of_local(entry.tensor.detach())


class PieceSavePlanner(SavePlanner):
    """Writes the given tensors' pieces, from the one tensor-parallel rank that answers for each element.

    Args:
        entries: what this rank writes; empty on the replicas that do not.
        names: every tensor that the ranks together must write.
    """

    def __init__(self, entries: Iterable[ShardedTensor], names: Collection[str]) -> None:
        self._names = names
        self._views: dict[MetadataIndex, Tensor] = {}
        self._items: list[WriteItem] = []
        for entry in entries:
            if entry.shard.is_primary:
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
        if written != needed or any(_overlap(a, b) for a, b in combinations(tensor.chunks, 2)):
            yield f"{name}: the ranks would write {written} elements of {needed}, or the same ones twice"


def _overlap(a: ChunkStorageMetadata, b: ChunkStorageMetadata) -> bool:
    return all(
        max(start_a, start_b) < min(start_a + size_a, start_b + size_b)
        for start_a, size_a, start_b, size_b in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )


def plan_reading(entries: Iterable[ShardedTensor], metadata: Metadata) -> list[tuple[ReadItem, Tensor]]:
    """Which slices of which saved boxes go where in the given tensors' memory.

    Raises:
        CheckpointError: the saved boxes do not cover a tensor (names all such).
    """
    wanted: list[tuple[ReadItem, Tensor]] = []
    problems = []
    for entry in entries:
        name = entry.name
        if not entry.shard.is_primary and copy_name(entry) in metadata.state_dict_metadata:
            name = copy_name(entry)
        boxes = [(MetadataIndex(name, index.offset), chunk, view) for index, chunk, view in boxes_of(entry)]
        saved = metadata.state_dict_metadata.get(name)
        found = (
            create_read_items_for_chunk_list(name, saved, [chunk for _, chunk, _ in boxes])
            if isinstance(saved, TensorStorageMetadata) and tuple(saved.size) == entry.shard.global_shape
            else []
        )
        if sum(prod(item.lengths) for item in found) != entry.tensor.numel():
            problems.append(f"{entry.name}: the files do not hold all of what metadata.json says")
        views = {index: view for index, _, view in boxes}
        wanted += [(item, _target(views[item.dest_index], item)) for item in found]
    if problems:
        raise CheckpointError(*problems)
    return wanted


def _target(view: Tensor, item: ReadItem) -> Tensor:
    for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
        view = view.narrow(dim, start, length)
    return view
