"""State of a run on one rank, the optimizer's included, as global tensors: moments are cut like their parameter.

The state `exp_avg` of the parameter `head.weight` becomes `optimizer.exp_avg.head.weight`. A single number
(`step`) is a whole tensor that every tensor-parallel rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megasnn.checkpoint.format import OPTIMIZER, SavedTensor
from megasnn.files import CheckpointError
from megasnn.parallel.sharding import Shard, ShardedTensor

States = dict[Tensor, dict[str, Tensor]]


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
        """Everything that a checkpoint takes from this rank. Raises CheckpointError as `describe`."""
        states = self.optimizer.state if self.optimizer is not None else {}
        return [*self.stepped, *(self.averages or ()), *describe(self.stepped, states)]


def describe(tensors: Iterable[ShardedTensor], states: Mapping[Tensor, Mapping[str, Any]]) -> list[ShardedTensor]:
    """An optimizer's `state`, by parameter, as tensors with a name and a shard.

    A state of None (SGD without momentum has that) is nothing to store.

    Raises:
        CheckpointError: a parameter that `tensors` lacks, or a value that is neither a tensor of the parameter's
            local shape nor a single-number tensor.
    """
    entry_of = {id(entry.tensor): entry for entry in tensors}
    return [
        _describe_value(_entry(entry_of, parameter), kind, value)
        for parameter, state in states.items()
        for kind, value in state.items()
        if value is not None
    ]


def _describe_value(entry: ShardedTensor, kind: str, value: Any) -> ShardedTensor:
    name = f"{OPTIMIZER}{kind}.{entry.name}"
    if isinstance(value, Tensor) and value.shape == entry.tensor.shape:
        return ShardedTensor(name, value, entry.shard, is_parameter=False)
    if isinstance(value, Tensor) and value.dim() == 0:
        return ShardedTensor(name, value, Shard((), place=entry.shard.place), is_parameter=False)
    raise CheckpointError(
        f"{name}: only tensors of the parameter's shape {list(entry.tensor.shape)} and single-number tensors "
        f"can be saved, found {list(value.shape) if isinstance(value, Tensor) else repr(value)}"
    )


def _entry(entry_of: Mapping[int, ShardedTensor], parameter: Tensor) -> ShardedTensor:
    if id(parameter) not in entry_of:
        raise CheckpointError(f"the optimizer holds a parameter of shape {list(parameter.shape)} without a name")
    return entry_of[id(parameter)]


def state_names(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Kind of state and name of the parameter, of those names that are an optimizer's."""
    for name in names:
        if name.startswith(OPTIMIZER):
            kind, _, parameter = name.removeprefix(OPTIMIZER).partition(".")
            yield kind, parameter


def allocate(
    tensors: Iterable[ShardedTensor], optimizer: torch.optim.Optimizer, saved: Mapping[str, SavedTensor]
) -> States:
    """Allocates memory, without values, for the saved state of this rank's parameters; the optimizer is not touched.

    A parameter without saved state (it was frozen, or nothing had been stepped yet) gets an empty one.

    Raises:
        CheckpointError: the optimizer has a parameter that `tensors` lacks.
    """
    kinds_of: dict[str, list[str]] = {}
    for kind, parameter_name in state_names(saved):
        kinds_of.setdefault(parameter_name, []).append(kind)
    entry_of = {id(entry.tensor): entry for entry in tensors}
    states: States = {}
    for group in optimizer.param_groups:
        # These two variants of torch's optimizers keep `step` beside the parameter, all others on the CPU.
        beside = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            entry = _entry(entry_of, parameter)
            kinds = kinds_of.get(entry.name, [])
            states[parameter] = {kind: _memory(entry, kind, saved, beside or kind != "step") for kind in kinds}
    return states


def _memory(entry: ShardedTensor, kind: str, saved: Mapping[str, SavedTensor], beside_parameter: bool) -> Tensor:
    state = saved[f"{OPTIMIZER}{kind}.{entry.name}"]
    dtype, device = getattr(torch, state.dtype), entry.tensor.device if beside_parameter else torch.device("cpu")
    if kind == "step" or state.shape != entry.shard.global_shape:
        return torch.empty((), dtype=dtype, device=device)
    if state.dtype == saved.get(entry.name, state).dtype:  # moments that had their parameter's precision keep doing so
        dtype = entry.tensor.dtype
    return torch.empty_like(entry.tensor, dtype=dtype, device=device, requires_grad=False)
