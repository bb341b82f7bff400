"""This rank's optimizer: parameter groups, and state memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megasnn.common.grid import Axis
from megasnn.config.optimizer import OPTIMIZERS, OptimizerConfig
from megasnn.optim.norms import ShardedNorms
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel_state import Group


def build_optimizer(
    tensors: Sequence[ShardedTensor],
    config: OptimizerConfig,
    groups: Mapping[Axis, Group] | None = None,
    scales: Mapping[str, float] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """Parameter groups have `weight_decay` and `lr_scale`.

    Args:
        groups: this rank's, along each axis that cuts a tensor; None without cuts.
        scales: `learning_rate_scales`; 1 for parameters not named.
    """
    trained = [entry for entry in tensors if entry.is_parameter and entry.tensor.requires_grad]
    # A pipeline stage may hold no parameters. torch's optimizers accept empty groups, but not an empty list of groups.
    by_scale: dict[float, list[ShardedTensor]] = {} if trained else {1.0: []}
    for entry in trained:
        by_scale.setdefault(scales.get(entry.name, 1.0), []).append(entry)
    parameters: list[dict[str, Any]] = []
    for scale, entries in by_scale.items():
        decaying: list[Tensor] = []
        others: list[Tensor] = []
        for entry in entries:
            # The bias of a parallel spiking neuron is `[T, 1]`.
            is_weight = len(entry.shard.global_shape) > 1 and not entry.name.endswith(".bias")
            (decaying if is_weight else others).append(entry.tensor)
        parameters.append({"params": decaying, "weight_decay": config.weight_decay, "lr_scale": scale})
        parameters.append({"params": others, "weight_decay": 0.0, "lr_scale": scale})
    recipe = OPTIMIZERS[config.optimizer]
    options = config.build_options
    if recipe.takes_norms:
        options["norms"] = ShardedNorms(trained, groups or {})
    return recipe.build(parameters, lr=config.lr, **options)


def takes_found_inf(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> bool:
    """Whether `found_inf` on the device can skip a step; see `OptimizerRecipe`."""
    learning = [group for group in optimizer.param_groups if group["params"]]
    return OPTIMIZERS[config.optimizer].takes_found_inf and all(group.get("fused") for group in learning)


def resident_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """State bytes now: none before the first step, unless loaded."""
    total = 0
    for state in optimizer.state.values():
        total += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
    return total
