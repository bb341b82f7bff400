"""State of a run on one rank, the optimizer's included, as global tensors: moments are cut like their parameter.

The state `exp_avg` of the parameter `head.weight` becomes `optimizer.exp_avg.head.weight`. A single number
(`step`) is a whole tensor that every tensor-parallel rank holds.
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
    """Tensors of a run on one rank.

    Attributes:
        tensors: parameters and buffers.
        optimizer: None where its state is neither saved nor loaded.
        owned: the optimizer's part of the tensors, where replicas share them by rows; None: the tensors themselves.
        averages: the running average of what is owned; None without one.
    """

    tensors: Sequence[ShardedTensor]
    optimizer: torch.optim.Optimizer | None = None
    owned: Sequence[ShardedTensor] | None = None
    averages: Sequence[ShardedTensor] | None = None

    @property
    def stepped(self) -> Sequence[ShardedTensor]:
        """The optimizer's part of the tensors."""
        return self.tensors if self.owned is None else self.owned

    def entries(self) -> list[ShardedTensor]:
        """Everything that a checkpoint takes from this rank. Raises CheckpointError as `describe_states`."""
        states = self.optimizer.state if self.optimizer is not None else {}
        return [*self.stepped, *(self.averages or ()), *describe_states(self.stepped, states)]


def describe_states(
    tensors: Iterable[ShardedTensor], states: Mapping[Tensor, Mapping[str, Any]]
) -> list[ShardedTensor]:
    """An optimizer's `state`, by parameter, as tensors with a name and a shard.

    A state of None (SGD without momentum has that) is nothing to store. Raises CheckpointError for a value that is
    neither a tensor of the parameter's local shape nor a single-number tensor.
    """
    entry_of, found = {id(entry.tensor): entry for entry in tensors}, []
    for parameter, state in states.items():
        entry = entry_of[id(parameter)]
        for kind, value in state.items():
            if value is None:
                continue
            name, shape = f"{OPTIMIZER}{kind}.{entry.name}", getattr(value, "shape", None)
            if shape not in (entry.tensor.shape, ()):
                given = repr(value) if shape is None else list(shape)
                raise CheckpointError(f"{name}: {given} cannot be saved, only tensors of its shape or of one number")
            shard = entry.shard if shape == entry.tensor.shape else Shard((), coordinates=entry.shard.coordinates)
            found.append(ShardedTensor(name, value, shard, is_parameter=False))
    return found


def state_names(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Kind of state and name of the parameter, of those names that are an optimizer's."""
    for name in names:
        if name.startswith(OPTIMIZER):
            kind, _, parameter = name.removeprefix(OPTIMIZER).partition(".")
            yield kind, parameter


def allocate(
    tensors: Iterable[ShardedTensor], optimizer: torch.optim.Optimizer, saved: Mapping[str, SavedTensor]
) -> OptimizerStates:
    """Allocates memory, without values, for the saved state of this rank's parameters; the optimizer is not touched.

    A parameter without saved state (it was frozen, or nothing had been stepped yet) gets an empty one.
    """
    kinds_of = defaultdict[str, list[str]](list)
    for kind, name in state_names(saved):
        kinds_of[name].append(kind)
    entry_of = {id(entry.tensor): entry for entry in tensors}
    states: OptimizerStates = {}
    for group in optimizer.param_groups:
        # These two variants of torch's optimizers keep `step` beside the parameter, all others on the CPU.
        beside = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            entry = entry_of[id(parameter)]
            states[parameter] = {kind: _memory(entry, kind, saved, beside) for kind in kinds_of[entry.name]}
    return states


def _memory(entry: ShardedTensor, kind: str, saved: Mapping[str, SavedTensor], step_beside: bool) -> Tensor:
    state = saved[f"{OPTIMIZER}{kind}.{entry.name}"]
    dtype = getattr(torch, state.dtype)
    device = entry.tensor.device if step_beside or kind != "step" else torch.device("cpu")
    if kind == "step" or state.shape != entry.shard.global_shape:
        return torch.empty((), dtype=dtype, device=device)
    if state.dtype == saved.get(entry.name, state).dtype:  # moments that had their parameter's precision keep doing so
        dtype = entry.tensor.dtype
    return torch.empty_like(entry.tensor, dtype=dtype, device=device, requires_grad=False)
