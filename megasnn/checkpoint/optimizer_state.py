"""An optimizer's state seen as global tensors: the moments of a parameter are cut like the parameter itself.

The state `exp_avg` of the parameter `head.weight` becomes `optimizer.exp_avg.head.weight`. A single number
(`step`) is a whole tensor that every tensor-parallel rank holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megasnn.checkpoint.description import PREFIX, TensorFacts
from megasnn.files.problems import CheckpointError
from megasnn.sharded_tensors import ShardedTensor

States = dict[Tensor, dict[str, Tensor]]
_MOST_STEPS = 2**53  # beyond that a float64 does not count


def describe(tensors: Iterable[ShardedTensor], states: Mapping[Tensor, Mapping[str, Any]]) -> list[ShardedTensor]:
    """An optimizer's `state`, by parameter, as tensors with a name and a shard.

    A state of None (SGD without momentum has that) is nothing to store.

    Raises:
        CheckpointError: a parameter that `tensors` does not hold, or a value that is neither a tensor of the
            parameter's local shape nor a single-number tensor.
    """
    entry_of = _entries_by_parameter(tensors)
    return [
        _describe_value(_entry(entry_of, parameter), kind, value)
        for parameter, state in states.items()
        for kind, value in state.items()
        if value is not None
    ]


def _describe_value(entry: ShardedTensor, kind: str, value: Any) -> ShardedTensor:
    name = f"{PREFIX}{kind}.{entry.name}"
    if isinstance(value, Tensor) and value.shape == entry.tensor.shape:
        return ShardedTensor(name, value, entry.shard, is_parameter=False)
    if isinstance(value, Tensor) and value.dim() == 0:
        return ShardedTensor(name, value, entry.shard.whole(), is_parameter=False)
    raise CheckpointError(
        f"{name}: only tensors of the parameter's shape {list(entry.tensor.shape)} and single-number tensors "
        f"can be saved, found {list(value.shape) if isinstance(value, Tensor) else repr(value)}"
    )


def allocate(
    tensors: Iterable[ShardedTensor],
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, TensorFacts],
    needed: Collection[str] = (),
) -> States:
    """Memory without values for the saved state of this rank's parameters; the optimizer is not touched.

    A parameter without saved state (it was frozen, or nothing had been stepped yet) gets an empty one.

    Args:
        saved: all saved tensors by global name.
        needed: the kinds of state that the optimizer keeps of each parameter.

    Raises:
        CheckpointError: the optimizer has a parameter that `tensors` does not hold, or what is saved is no state of
            this optimizer: kinds are missing, or are of another type than its numbers.
    """
    kinds_of: dict[str, list[str]] = {}
    for name in saved:
        if name.startswith(PREFIX):
            kind, parameter_name = name.removeprefix(PREFIX).split(".", 1)
            kinds_of.setdefault(parameter_name, []).append(kind)
    entry_of = _entries_by_parameter(tensors)
    states: States = {}
    for group in optimizer.param_groups:
        # These two variants of torch's optimizers keep `step` beside the parameter, all others on the CPU.
        beside = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            entry = _entry(entry_of, parameter)
            kinds = kinds_of.get(entry.name, [])
            if missing := [kind for kind in needed if kind not in kinds] if kinds else []:
                raise CheckpointError(
                    f"{PREFIX}{missing[0]}.{entry.name}: not in the checkpoint, which has others of it"
                )
            states[parameter] = {kind: _memory(entry, kind, saved, beside or kind != "step") for kind in kinds}
    return states


def of_frozen(tensors: Iterable[ShardedTensor], saved: Iterable[str]) -> list[str]:
    """The saved state of those parameters that are frozen now: an optimizer leaves it aside."""
    frozen = {entry.name for entry in tensors if entry.is_parameter and not entry.tensor.requires_grad}
    state = (name for name in saved if name.startswith(PREFIX))
    return [name for name in state if name.removeprefix(PREFIX).split(".", 1)[1] in frozen]


def require_possible(states: States, tensors: Iterable[ShardedTensor]) -> None:
    """Raises CheckpointError for a count of steps that was loaded and that no optimizer has counted."""
    entry_of = _entries_by_parameter(tensors)
    for parameter, state in states.items():
        count = state["step"].item() if "step" in state else 0
        if not 0 <= count <= _MOST_STEPS:
            name = f"{PREFIX}step.{_entry(entry_of, parameter).name}"
            raise CheckpointError(f"{name}: {count} is no number of steps; load it with --no-load-optim")


def _memory(entry: ShardedTensor, kind: str, saved: Mapping[str, TensorFacts], beside_parameter: bool) -> Tensor:
    told = saved[f"{PREFIX}{kind}.{entry.name}"]
    if not getattr(torch, told.dtype).is_floating_point:
        raise CheckpointError(f"{PREFIX}{kind}.{entry.name}: saved as {told.dtype}, which no optimizer's state is of")
    device = entry.tensor.device if beside_parameter else torch.device("cpu")
    if kind == "step" or told.shape != entry.shard.global_shape:
        return torch.empty((), dtype=getattr(torch, told.dtype), device=device)
    # Moments that had their parameter's precision when they were saved have it now, too.
    as_parameter = told.dtype == saved.get(entry.name, told).dtype
    dtype = entry.tensor.dtype if as_parameter else getattr(torch, told.dtype)
    return torch.empty_like(entry.tensor, dtype=dtype, device=device, requires_grad=False)


def _entries_by_parameter(tensors: Iterable[ShardedTensor]) -> dict[int, ShardedTensor]:
    return {id(entry.tensor): entry for entry in tensors}


def _entry(entry_of: Mapping[int, ShardedTensor], parameter: Tensor) -> ShardedTensor:
    if id(parameter) not in entry_of:
        raise CheckpointError(f"the optimizer holds a parameter of shape {list(parameter.shape)} without a name")
    return entry_of[id(parameter)]
