"""The optimizer, its learning rate over time, and gradient clipping."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Literal

from pydantic.dataclasses import dataclass

from megasnn.config.checks import flag
from megasnn.config.fields import Count, NonNegative, Positive, ShareBelowOne
from megasnn.files import STRICT
from megasnn.optimizers import DECAY_STYLES, OPTIMIZERS


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
    ema_decay: ShareBelowOne = 0.0
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
