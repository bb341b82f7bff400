"""The optimizer, its learning rate over time, and gradient clipping.

The tables of optimizers and of decay styles stand beside their flags. They need no torch until one is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass as plain_dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic.dataclasses import dataclass

from megasnn.common.files import STRICT
from megasnn.common.registry import Registry, later
from megasnn.config.checks import Count, FractionBelowOne, NonNegative, Positive, flag

if TYPE_CHECKING:
    from torch.optim import Optimizer

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@plain_dataclass(frozen=True)
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


OPTIMIZERS: Registry[OptimizerRecipe] = Registry(
    "--optimizer",
    {
        "adamw": OptimizerRecipe("arXiv 1711.05101", _adamw, _MOMENTS, takes_found_inf=True),
        # torch's fused SGD does not: after a first step that is left out its momentum is unwritten memory
        # (findings/torch_fused_sgd_skipped_step.sh).
        "sgd": OptimizerRecipe("with momentum, as torch's", _sgd, ("momentum_buffer",)),
        "lamb": OptimizerRecipe(
            "arXiv 1904.00962, in timm's form",
            later("megasnn.optim.lamb:build_lamb"),
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


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """Linear warm-up to `lr`, then decay to `min_lr` at the end of the training."""

    optimizer: Annotated[str, OPTIMIZERS] = "adamw"
    """Update rule of the weights."""
    lr: Positive = 1e-3
    """Highest learning rate."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Annotated[str, DECAY_STYLES] = "cosine"
    """Schedule of the learning rate from --lr to --min-lr, or constant."""
    lr_warmup_iters: Count = 0
    """Iterations of linear warm-up."""
    lr_warmup_epochs: Count = 0
    """Epochs of warm-up, instead of --lr-warmup-iters."""
    lr_warmup_init: NonNegative | None = None
    """Learning rate of the first step; by default --lr divided by the steps of the warm-up."""
    lr_cooldown_epochs: Count = 0
    """Epochs at the end of the training that stay at --min-lr."""
    lr_interval: Literal["iteration", "epoch"] = "iteration"
    """Step of the schedule; epoch is timm's, whose decay counts from the start of the training."""
    weight_decay: NonNegative = 0.01
    """Decay of the weights in a step; not applied to norms, biases and time constants."""
    ema_decay: FractionBelowOne = 0.0
    """Share that a running average of the weights, which is evaluated, keeps of itself in a step; 0: none."""
    clip_grad: NonNegative = 1.0
    """Largest norm of the gradient over all parameters; 0 does not clip."""

    def warmup_iterations(self, epoch: Fraction = Fraction(1)) -> int | Fraction:
        """Iterations of warm-up, with `epoch` of them in an epoch."""
        if not self.lr_warmup_epochs:
            return self.lr_warmup_iters
        warm_up = self.lr_warmup_epochs * epoch
        return warm_up if self.lr_interval == "epoch" else int(warm_up)

    def problems(self) -> list[str]:
        """Contradictions, with values and flags."""
        wrong = []
        for name in ("min_lr", "lr_warmup_init"):
            if (rate := getattr(self, name)) is not None and rate > self.lr:
                wrong.append(f"{flag(name)} {rate} is greater than --lr {self.lr}")
        iters, epochs = f"--lr-warmup-iters {self.lr_warmup_iters}", f"--lr-warmup-epochs {self.lr_warmup_epochs}"
        if self.lr_warmup_iters and self.lr_warmup_epochs:
            wrong.append(f"give either {iters} or {epochs}")
        elif self.lr_interval == "epoch" and self.lr_warmup_iters:
            wrong.append(f"--lr-interval epoch takes the warm-up in epochs: --lr-warmup-epochs, not {iters}")
        return wrong
