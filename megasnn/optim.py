"""Optimizer, learning-rate schedule, and a gradient norm that does not depend on the layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megasnn.comm.collectives import all_reduce_sum
from megasnn.comm.group import Group
from megasnn.grid import HOLDING_AXES
from megasnn.sharding import ShardedTensor

if TYPE_CHECKING:
    from megasnn.config.optimizer import OptimizerConfig

_MODEL_AXES = tuple(axis for axis in HOLDING_AXES if axis != "data")


def build_optimizer(tensors: Sequence[ShardedTensor], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101), decaying matrices and kernels only: not norms, biases and time constants."""
    trained = [entry for entry in tensors if entry.is_parameter and entry.tensor.requires_grad]
    decayed = [entry.tensor for entry in trained if len(entry.shard.global_shape) > 1]
    others = [entry.tensor for entry in trained if len(entry.shard.global_shape) <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (config.adam_beta1, config.adam_beta2)
    # A pipeline stage may hold no layers, and AdamW takes no empty list of parameters, but it takes empty groups.
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=bool(trained) or None)


def state_bytes(trained: Iterable[Tensor]) -> int:
    """What the state of `build_optimizer` takes after a step: two moments like each parameter, and a count of steps."""
    return sum(2 * parameter.nbytes + torch.float32.itemsize for parameter in trained)


def held_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the optimizer's state takes now: nothing before the first step, unless it was loaded."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def learning_rate(config: OptimizerConfig, iteration: int, iterations: int) -> float:
    """The rate of step `iteration` (from 0): linear warm-up, then constant, or linear or cosine decay to min_lr."""
    warm_up = config.warmup_iterations(iterations)
    if iteration < warm_up:
        return config.lr * (iteration + 1) / warm_up
    progress = min((iteration - warm_up) / max(iterations - warm_up, 1), 1.0)
    share = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.lr_decay_style]
    return config.min_lr + (config.lr - config.min_lr) * share


class GradientNorm:
    """The global L2 norm of all gradients, every parameter counted once, on any layout.

    Each global parameter has a slot; a rank adds the squares of what it holds (of an uncut parameter only one
    tensor-parallel rank does), and the slots are summed in the order of the model. Splitting the model over more
    pipeline stages therefore changes no bit of the norm.

    Args:
        names: the parameters of the whole model, in order.
        tensors: those of this rank.
        model: the group that together holds one model: no two of its ranks differ along the data axis.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[ShardedTensor], model: Group) -> None:
        slots = {name: slot for slot, name in enumerate(names)}
        self._count, self._model = len(names), model
        self._mine = [(slots[e.name], e.tensor, e.shard.is_primary(_MODEL_AXES)) for e in tensors if e.is_parameter]

    def __call__(self) -> float:
        """Collective over the model group. NaN and infinity come out as such."""
        device = self._mine[0][1].device if self._mine else torch.device("cpu")
        squares = torch.zeros(self._count, dtype=torch.float64, device=device)
        for slot, parameter, primary in self._mine:
            if primary and parameter.grad is not None:
                squares[slot] = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) ** 2
        return math.sqrt(math.fsum(all_reduce_sum(squares, self._model, "step").tolist()))

    def clip(self, norm: float, most: float) -> None:
        """Scales the gradients by most / (norm + 1e-6) where that is less than 1; 0 clips nothing.

        torch.nn.utils.clip_grad_norm_ and Megatron-LM do it with the same small number.
        """
        scale = most / (norm + 1e-6)
        if most <= 0 or not scale < 1:
            return
        gradients: list[Tensor] = [p.grad for _, p, _ in self._mine if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, scale)
