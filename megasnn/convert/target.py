"""What each rank of a process grid would hold of a checkpoint, from the model's description alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megasnn.checkpoint.description import AVERAGE, PREFIX
from megasnn.checkpoint.errors import raise_problems
from megasnn.comm.group import Group
from megasnn.convert.model import SavedModel
from megasnn.convert.source import TensorInfo
from megasnn.layers import BuildContext
from megasnn.sharding import Shard, ShardedTensor, sharded_tensors


@dataclass(frozen=True)
class TargetRank:
    """One rank of the target; replicas hold the same.

    Attributes:
        tensor, pipeline: its place.
        entries: its tensors, without memory, the optimizer's state among them.
    """

    tensor: int
    pipeline: int
    entries: list[ShardedTensor]


def target_ranks(
    model: SavedModel,
    tensors: Mapping[str, TensorInfo],
    tensor_size: int,
    bounds: Sequence[range],
    placement: Sequence[int],
) -> list[TargetRank]:
    """All ranks that hold something different, pipeline by pipeline stage.

    Args:
        tensors: what the checkpoint holds.
        bounds: the layers of each chunk.
        placement: the pipeline rank of each chunk.
    Raises:
        CheckpointError: the checkpoint does not hold exactly the model's tensors (lists them).
        ValueError: a dimension cannot be cut over so many ranks.
    """
    ranks = [TargetRank(rank, stage, []) for stage in range(max(placement) + 1) for rank in range(tensor_size)]
    taken: set[str] = set()
    problems: list[str] = []
    for rank in ranks:
        group = Group("tensor", tuple(range(tensor_size)), rank.tensor)
        layers = [
            model.description.layers[index]
            for span, home in zip(bounds, placement, strict=True)
            if home == rank.pipeline
            for index in span
        ]
        for entry in sharded_tensors((layer.name, layer.build(BuildContext(group))) for layer in layers):
            rank.entries.extend(_saved(entry, tensors, problems))
        taken.update(entry.name for entry in rank.entries)
    problems += [f"{name}: saved, but its model has no such tensor" for name in tensors if name not in taken]
    raise_problems("the checkpoint is not of the model that it describes:", problems)
    return ranks


def _saved(entry: ShardedTensor, tensors: Mapping[str, TensorInfo], problems: list[str]) -> Iterator[ShardedTensor]:
    """A tensor of the model as it is saved, its average and its optimizer state."""
    info = tensors.get(entry.name)
    if info is None or info.shape != entry.shard.global_shape:
        found = "missing" if info is None else f"saved with shape {list(info.shape)}"
        problems.append(f"{entry.name}: {found}, the model needs {list(entry.shard.global_shape)}")
        return
    yield without_memory(entry.name, entry.shard, info)
    average = tensors.get(f"{AVERAGE}{entry.name}")
    if average is not None and average.shape == info.shape:
        yield without_memory(f"{AVERAGE}{entry.name}", entry.shard, average)
    for kind in optimizer_kinds(tensors) if entry.is_parameter else ():
        state = tensors.get(f"{PREFIX}{kind}.{entry.name}")
        if state is not None:
            name = f"{PREFIX}{kind}.{entry.name}"
            yield without_memory(name, entry.shard if state.shape == info.shape else entry.shard.whole(), state)


def optimizer_kinds(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """The kinds of optimizer state there are, like `exp_avg`."""
    return sorted({name.removeprefix(PREFIX).split(".", 1)[0] for name in tensors if name.startswith(PREFIX)})


def without_memory(name: str, shard: Shard, info: TensorInfo) -> ShardedTensor:
    """Described like a rank's part, with a single element of memory: cutting it costs less than on the meta device."""
    return ShardedTensor(name, torch.empty((), dtype=info.dtype).expand(shard.local_shape), shard, False)
