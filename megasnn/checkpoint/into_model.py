"""Whole tensors from elsewhere into a model of which every rank holds a part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.checkpoint.agreement import gather
from megasnn.checkpoint.errors import raise_problems
from megasnn.sharding import ShardedTensor


def load_globals_into(
    tensors: Iterable[ShardedTensor],
    values: Mapping[str, Tensor],
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Copies this rank's part of every global tensor into the model, converted to the model's dtype.

    Collective over `process_group`, the group of all ranks (None for a process on its own): together they
    must take exactly the tensors given.

    Raises:
        CheckpointError: on every rank, before anything is changed: a tensor is missing, one is taken by
            nobody, or a shape differs.
    """
    entries = list(tensors)
    reports = gather(process_group, ([entry.name for entry in entries], list(_mismatches(entries, values))))
    unexpected = set(values) - {name for names, _ in reports for name in names}
    problems = [problem for _, found in reports for problem in found]
    problems += [f"{name}: given, but this model has no such tensor" for name in unexpected]
    raise_problems("these weights are not this model's:", problems)
    with torch.no_grad():
        for entry in entries:
            for piece in entry.shard.pieces():
                piece.of_local(entry.tensor).copy_(piece.of_global(values[entry.name]))


def _mismatches(entries: Iterable[ShardedTensor], values: Mapping[str, Tensor]) -> Iterable[str]:
    for entry in entries:
        value = values.get(entry.name)
        if value is None:
            yield f"{entry.name}: missing"
        elif tuple(value.shape) != entry.shard.global_shape:
            needed = list(entry.shard.global_shape)
            yield f"{entry.name}: has shape {list(value.shape)}, this model needs {needed}"
