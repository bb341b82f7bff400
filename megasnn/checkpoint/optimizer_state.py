"""One rank's optimizer state as global tensors: moments are cut like their parameter.

`exp_avg` for `head.weight` becomes `optimizer.exp_avg.head.weight`. Every tensor parallel rank has `step` whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megasnn.checkpoint.format import OPTIMIZER, SavedTensor
from megasnn.common.files import CheckpointError
from megasnn.parallel.sharding import Shard, ShardedTensor

OptimizerStates = dict[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class LocalState:
    """A run's tensors on one rank.

    Attributes:
        tensors: parameters and buffers.
        optimizer: None if its state is neither saved nor loaded.
        optimizer_tensors: the tensors that the optimizer updates, under ZeRO its shards; None: `tensors`.
        averages: moving average of the same tensors, if any.
    """

    tensors: Sequence[ShardedTensor]
    optimizer: torch.optim.Optimizer | None = None
    optimizer_tensors: Sequence[ShardedTensor] | None = None
    averages: Sequence[ShardedTensor] | None = None

    @property
    def stepped(self) -> Sequence[ShardedTensor]:
        return self.tensors if self.optimizer_tensors is None else self.optimizer_tensors

    def entries(self) -> list[ShardedTensor]:
        """All this rank's tensors in a checkpoint. Raises CheckpointError as `describe_states`."""
        states = {} if self.optimizer is None else self.optimizer.state
        return [*self.stepped, *(self.averages or ()), *describe_states(self.stepped, states)]


def describe_states(
    tensors: Iterable[ShardedTensor], states: Mapping[Tensor, Mapping[str, Any]]
) -> list[ShardedTensor]:
    """An optimizer's `state`, by parameter, as named shards. None, as in SGD without momentum, is not stored.

    Raises:
        CheckpointError: a value is neither a tensor in the parameter's local shape nor a single number.
    """
    entry_of = {id(entry.tensor): entry for entry in tensors}
    found = []
    for parameter, state in states.items():
        entry = entry_of[id(parameter)]
        for kind, value in state.items():
            if value is None:
                continue
            name = f"{OPTIMIZER}{kind}.{entry.name}"
            shape = getattr(value, "shape", None)
            if shape == entry.tensor.shape:
                shard = entry.shard
            # Such as `step`: every rank has the same number.
            elif shape == ():
                shard = Shard((), coordinates=entry.shard.coordinates)
            else:
                got = repr(value) if shape is None else list(shape)
                raise CheckpointError(f"{name}: {got} cannot be saved, only tensors of its shape or of one number")
            found.append(ShardedTensor(name, value, shard, is_parameter=False))
    return found


def state_names(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields (state, parameter name)."""
    for name in names:
        if name.startswith(OPTIMIZER):
            kind, _, parameter = name.removeprefix(OPTIMIZER).partition(".")
            yield kind, parameter


def allocate(
    tensors: Iterable[ShardedTensor], optimizer: torch.optim.Optimizer, saved: Mapping[str, SavedTensor]
) -> OptimizerStates:
    """Allocates saved state, without values; the optimizer is not touched."""
    kinds_of = defaultdict[str, list[str]](list)
    for kind, name in state_names(saved):
        kinds_of[name].append(kind)
    entry_of = {id(entry.tensor): entry for entry in tensors}
    states: OptimizerStates = {}
    # As the optimizer would at its first step: torch takes the state only in its own types and places.
    for group in optimizer.param_groups:
        # Fused and capturable optimizers of torch keep `step` on the parameter's device, all others on the CPU.
        step_on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            entry = entry_of[id(parameter)]
            # A parameter without saved state (frozen, or before the first step) gets an empty one.
            states[parameter] = {kind: _empty(entry, kind, saved, step_on_device) for kind in kinds_of[entry.name]}
    return states


def _empty(entry: ShardedTensor, kind: str, saved: Mapping[str, SavedTensor], step_on_device: bool) -> Tensor:
    state = saved[f"{OPTIMIZER}{kind}.{entry.name}"]
    dtype = getattr(torch, state.dtype)
    if kind == "step":
        device = entry.tensor.device if step_on_device else torch.device("cpu")
        return torch.empty((), dtype=dtype, device=device)
    if state.shape != entry.shard.global_shape:
        return torch.empty((), dtype=dtype, device=entry.tensor.device)
    # Moments with the precision of their parameter keep to it when the run loads in another precision.
    if state.dtype == saved.get(entry.name, state).dtype:
        dtype = entry.tensor.dtype
    return torch.empty_like(entry.tensor, dtype=dtype, requires_grad=False)
