"""The optimizer of `--optimizer` over this rank's parameters, and what its state takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megasnn.config.optimizer import OptimizerConfig
from megasnn.grid import Axis
from megasnn.optim.groups import parameter_groups
from megasnn.optim.norms import ShardedNorms
from megasnn.optimizers import OPTIMIZERS, Stepped
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel_state import Group


def build_optimizer(
    tensors: Sequence[ShardedTensor],
    config: OptimizerConfig,
    groups: Mapping[Axis, Group] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of `--optimizer` over the trained ones of these tensors; see `parameter_groups`.

    Args:
        groups: this rank's group along each axis that tensors are cut over; None where none of them is cut.
    """
    parts = parameter_groups(tensors, config)
    recipe = OPTIMIZERS[config.optimizer]
    trained = [entry for entry in tensors if entry.is_parameter and entry.tensor.requires_grad]
    norms = {"norms": ShardedNorms(trained, groups or {})} if recipe.takes_norms else {}
    return recipe.build(parts, lr=config.lr, **_flags(config), **norms)


def takes_found_inf(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> bool:
    """Whether its step can be told by a value on the device to leave everything as it is; see `OptimizerRecipe`."""
    learning = [group for group in optimizer.param_groups if group["params"]]
    return OPTIMIZERS[config.optimizer].takes_found_inf and all(group.get("fused") for group in learning)


def state_bytes(trained: Iterable[Tensor], config: OptimizerConfig = OptimizerConfig()) -> int:  # noqa: B008  (frozen)
    """What the state of that optimizer takes after a step."""
    kinds = config.state_kinds()
    return sum(4 if kind == "step" else parameter.nbytes for parameter in trained for kind in kinds)


def working_bytes(tensors: Iterable[ShardedTensor], config: OptimizerConfig) -> int:
    """What a step of that optimizer takes meanwhile, beside its state, for the trained ones of these tensors."""
    trained = (entry for entry in tensors if entry.is_parameter and entry.tensor.requires_grad)
    return config.working_bytes(
        [
            Stepped(
                entry.tensor.numel(),
                entry.tensor.element_size(),
                config.decay_of(len(entry.shard.global_shape)) > 0,
            )
            for entry in trained
        ]
    )


def held_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the optimizer's state takes now: nothing before the first step, unless it was loaded."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _flags(config: OptimizerConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in OPTIMIZERS[config.optimizer].flags}
