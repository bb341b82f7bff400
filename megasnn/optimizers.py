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
    """
    Attributes:
        summary: for --help.
        build: (groups of parameters with their weight decay, lr=..., and each of `flags`) -> the optimizer.
        state: (each of `flags`) -> the kinds of state that it keeps of each parameter after a step, by the names that
            they have in its `state`. `step` is a single number, all others are like the parameter.
        flags: those that it takes, as fields of the configuration; others' are refused with it.
        elementwise: whether the step of an element follows from that element's value, gradient and state alone, and of
            the norms of whole tensors where it takes those. Others are refused where ranks hold parts of a tensor.
        takes_norms: whether `build` also gets `norms`, of whole tensors (megasnn.optim.norms.ShardedNorms).
        takes_found_inf: whether `step`, where the groups are `fused`, leaves everything as it is if the optimizer's
            attribute `found_inf`, a float on the device, is 1, as torch's GradScaler asks of optimizers. A GPU then
            need not wait for the host.
        working_copies: what a step takes beside the state, as a multiple of the parameters' bytes.
    """

    summary: str
    build: Callable[..., Optimizer]
    state: Callable[..., tuple[str, ...]]
    flags: tuple[str, ...] = ()
    elementwise: bool = True
    takes_norms: bool = False
    takes_found_inf: bool = False
    working_copies: float = 0.0


def _adamw(groups: Sequence[dict[str, Any]], lr: float, adam_beta1: float, adam_beta2: float) -> Optimizer:
    import torch

    # A pipeline stage may hold no layers, and AdamW takes no empty list of parameters, but it takes empty groups.
    fused = any(group["params"] for group in groups) or None
    return torch.optim.AdamW(groups, lr=lr, betas=(adam_beta1, adam_beta2), fused=fused)


def _sgd(groups: Sequence[dict[str, Any]], lr: float, sgd_momentum: float) -> Optimizer:
    import torch

    return torch.optim.SGD(groups, lr=lr, momentum=sgd_momentum)


def _moments(**flags: object) -> tuple[str, ...]:
    return "step", "exp_avg", "exp_avg_sq"


def _momentum(sgd_momentum: float, **flags: object) -> tuple[str, ...]:
    return ("momentum_buffer",) if sgd_momentum else ()


_ADAM_FLAGS = ("adam_beta1", "adam_beta2")

OPTIMIZERS: Registry[OptimizerRecipe] = Registry(
    "--optimizer",
    {
        "adamw": OptimizerRecipe("arXiv 1711.05101", _adamw, _moments, _ADAM_FLAGS, takes_found_inf=True),
        # Not so torch's fused SGD: a first step that is left out leaves a momentum that nobody has written.
        "sgd": OptimizerRecipe("with momentum, as torch's", _sgd, _momentum, ("sgd_momentum",)),
        "lamb": OptimizerRecipe(
            "arXiv 1904.00962, in timm's form",
            later("megasnn.optim.lamb:build"),
            _moments,
            _ADAM_FLAGS,
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
