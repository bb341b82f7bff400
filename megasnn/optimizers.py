"""Registries of optimizers and of learning-rate schedules. They need no torch, only what they build does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megasnn.registry import Registry, later

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True)
class OptimizerRecipe:
    """An optimizer whose step of an element follows from its value, gradient and state, and from norms of tensors.

    Attributes:
        summary: for --help.
        build: (groups of parameters with their weight decay, lr=...) -> the optimizer.
        state: kinds of state that it keeps of each parameter after a step, by the names that they have in its `state`.
            `step` is a single number, all others are like the parameter.
        takes_norms: whether `build` also gets `norms`, of whole tensors (megasnn.optim.norms.ShardedNorms).
        takes_found_inf: whether `step`, where the groups are `fused`, leaves everything as it is if the optimizer's
            attribute `found_inf`, a float on the device, is 1, as torch's GradScaler asks of optimizers. A GPU then
            need not wait for the host.
        working_copies: what a step takes beside the state, as a multiple of the parameters' bytes.
    """

    summary: str
    build: Callable[..., Optimizer]
    state: tuple[str, ...]
    takes_norms: bool = False
    takes_found_inf: bool = False
    working_copies: float = 0.0


def _adamw(groups: Sequence[dict[str, Any]], lr: float) -> Optimizer:
    import torch

    # A pipeline stage may hold no layers, and AdamW takes no empty list of parameters, but it takes empty groups.
    fused = any(group["params"] for group in groups) or None
    return torch.optim.AdamW(groups, lr=lr, fused=fused)


def _sgd(groups: Sequence[dict[str, Any]], lr: float) -> Optimizer:
    import torch

    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


_MOMENTS = ("step", "exp_avg", "exp_avg_sq")

OPTIMIZERS: Registry[OptimizerRecipe] = Registry(
    "--optimizer",
    {
        "adamw": OptimizerRecipe("arXiv 1711.05101", _adamw, _MOMENTS, takes_found_inf=True),
        # Not so torch's fused SGD: a first step that is left out leaves a momentum that nobody has written.
        "sgd": OptimizerRecipe("with momentum, as torch's", _sgd, ("momentum_buffer",)),
        "lamb": OptimizerRecipe(
            "arXiv 1904.00962, in timm's form",
            later("megasnn.optim.lamb:build"),
            _MOMENTS,
            takes_norms=True,
            working_copies=4,  # updates, factors of the type of the weights, and their 8-byte indices
        ),
    },
)

# Name -> (part of the iterations after the warm-up that is done) -> part of the way from --min-lr to --lr.
DECAY_STYLES: Registry[Callable[[float], float]] = Registry(
    "--lr-decay-style",
    {
        "constant": lambda done: 1.0,
        "linear": lambda done: 1.0 - done,
        "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    },
)
