"""The optimizers and the courses of the learning rate by name. The tables need no torch, only what they build does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megasnn.table import Table

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


@dataclass(frozen=True)
class OptimizerRecipe:
    """
    Attributes:
        summary: for --help.
        build: (groups of parameters with their weight decay, lr=..., and each of `flags`) -> the optimizer.
        state_bytes: what the state of a parameter takes after a step.
        flags: those that it takes, as fields of the configuration; others' are refused with it.
    """

    summary: str
    build: Callable[..., Optimizer]
    state_bytes: Callable[[Tensor], int]
    flags: tuple[str, ...] = ()


def _adamw(
    groups: Sequence[dict[str, Any]], lr: float, adam_beta1: float, adam_beta2: float, adam_eps: float
) -> Optimizer:
    import torch

    # A pipeline stage may hold no layers, and AdamW takes no empty list of parameters, but it takes empty groups.
    fused = any(group["params"] for group in groups) or None
    return torch.optim.AdamW(groups, lr=lr, betas=(adam_beta1, adam_beta2), eps=adam_eps, fused=fused)


OPTIMIZERS: Table[OptimizerRecipe] = Table(
    "--optimizer",
    {
        "adamw": OptimizerRecipe(
            "arXiv 1711.05101",
            _adamw,
            lambda parameter: 2 * parameter.nbytes + 4,  # two moments like the parameter, and a count of steps
            ("adam_beta1", "adam_beta2", "adam_eps"),
        ),
    },
)

# Name -> (part of the iterations after the warm-up that is done) -> part of the way from --min-lr to --lr.
DECAY_STYLES: Table[Callable[[float], float]] = Table(
    "--lr-decay-style",
    {
        "constant": lambda done: 1.0,
        "linear": lambda done: 1.0 - done,
        "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    },
)
