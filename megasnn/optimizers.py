"""The optimizers and the courses of the learning rate by name. The tables need no torch, only what they build does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megasnn.registry import Registry, later

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True)
class Stepped:
    """A parameter that an optimizer steps, or the part of it that a rank has.

    Attributes:
        elements: their number. itemsize: bytes of one. decays: whether it has a weight decay.
    """

    elements: int
    itemsize: int
    decays: bool

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize


def _nothing(parameters: Sequence[Stepped]) -> int:
    return 0


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
        takes_norms: whether `build` also gets `norms`, of whole tensors (megasnn.optim.ShardedNorms).
        takes_found_inf: whether `step`, where the groups are `fused`, leaves everything as it is if the optimizer's
            attribute `found_inf`, a float on the device, is 1, as torch's GradScaler asks of optimizers. A GPU then
            need not wait for the host.
        working: (the parameters) -> bytes that a step takes meanwhile for tensors like all of them, beside the state.
            What it takes for one parameter at a time does not count.
    """

    summary: str
    build: Callable[..., Optimizer]
    state: Callable[..., tuple[str, ...]]
    flags: tuple[str, ...] = ()
    elementwise: bool = True
    takes_norms: bool = False
    takes_found_inf: bool = False
    working: Callable[[Sequence[Stepped]], int] = _nothing


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


def _lamb_working(parameters: Sequence[Stepped]) -> int:
    """Updates and what they are divided by; or updates, and for what decays a factor for each element and the index,
    of 8 bytes, by which it is taken."""
    updates = sum(each.bytes for each in parameters)
    factors = sum(each.bytes + 8 * each.elements for each in parameters if each.decays)
    return updates + max(updates, factors)


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
            working=_lamb_working,
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
