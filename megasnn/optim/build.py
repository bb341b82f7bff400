"""The optimizer of `--optimizer` over this rank's parameters: which are trained, at which rate, with which decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megasnn.config.checks import flag
from megasnn.config.fields import last_match
from megasnn.config.optimizer import OptimizerConfig
from megasnn.grid import Axis
from megasnn.optim.norms import ShardedNorms
from megasnn.optimizers import OPTIMIZERS
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel_state import Group


def build_optimizer(
    tensors: Sequence[ShardedTensor], config: OptimizerConfig, groups: Mapping[Axis, Group] | None = None
) -> torch.optim.Optimizer:
    """Builds the optimizer over the trained ones of these tensors, in groups with `weight_decay` and `lr_scale`.

    Args:
        groups: this rank's group along each axis that tensors are cut over; None where none of them is cut.
    """
    # Both usual groups are there without parameters too: a pipeline stage may hold none.
    parts: dict[tuple[float, float], list[Tensor]] = {(config.weight_decay, 1.0): [], (0.0, 1.0): []}
    trained = _trained(tensors)
    for entry in trained:
        key = config.decay_of(len(entry.shard.global_shape)), config.lr_scale(entry.name)
        parts.setdefault(key, []).append(entry.tensor)
    parameters = [{"params": held, "weight_decay": decay, "lr_scale": scale} for (decay, scale), held in parts.items()]
    recipe = OPTIMIZERS[config.optimizer]
    options: dict[str, Any] = {name: getattr(config, name) for name in recipe.flags}
    if recipe.takes_norms:
        options["norms"] = ShardedNorms(trained, groups or {})
    return recipe.build(parameters, lr=config.lr, **options)


def takes_found_inf(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> bool:
    """Returns True where a value on the device can make a step leave everything as it is; see `OptimizerRecipe`."""
    learning = [group for group in optimizer.param_groups if group["params"]]
    return OPTIMIZERS[config.optimizer].takes_found_inf and all(group.get("fused") for group in learning)


def is_frozen(config: OptimizerConfig, name: str) -> bool:
    """Returns True where `--lr-scale-of` gives this parameter a rate of 0."""
    return config.lr_scale(name) == 0


def require_matches(config: OptimizerConfig, names: Sequence[str]) -> None:
    """Raises ValueError where a pattern has no effect on the parameters of a model, or none of them is trained."""
    patterns = config.lr_scale_patterns()
    matching = [last_match(patterns, name) for name in names]
    for pattern in patterns:
        if pattern not in matching:
            layers = ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
            raise ValueError(
                f"{flag('lr_scale_of')}: {pattern.text!r} matches no parameter, or only those that a later pattern "
                f"matches too; names are like {names[0]} and {names[-1]} (they begin with {layers})"
            )
    if all(is_frozen(config, name) for name in names):
        raise ValueError(f"--lr-scale-of {config.lr_scale_of} leaves no parameter to train")


def state_bytes(trained: Iterable[Tensor], config: OptimizerConfig) -> int:
    """Bytes of the optimizer's state after a step."""
    kinds = config.state_kinds()
    return sum(4 if kind == "step" else parameter.nbytes for parameter in trained for kind in kinds)


def working_bytes(tensors: Sequence[ShardedTensor], config: OptimizerConfig) -> int:
    """Bytes that a step takes beside the state, for the trained ones of these tensors."""
    return config.working_bytes(sum(entry.tensor.nbytes for entry in _trained(tensors)))


def held_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state now: none before the first step, unless it was loaded."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _trained(tensors: Sequence[ShardedTensor]) -> list[ShardedTensor]:
    return [entry for entry in tensors if entry.is_parameter and entry.tensor.requires_grad]
