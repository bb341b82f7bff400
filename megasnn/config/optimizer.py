"""The optimizer, its learning rate over time, and gradient clipping."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Literal

from pydantic.dataclasses import dataclass

from megasnn.config.checks import flag, flags_of_others, refusal
from megasnn.config.fields import Count, NonNegative, Pattern, Positive, ShareBelowOne, last_match, patterns
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
    lr_scale_of: str | None = None
    """Multiples of the learning rate for parameters by name, "patch_embed.*=0,blocks.*=0.5"; 0 freezes them."""
    ema_decay: ShareBelowOne = 0.0
    """Share that a running average of the weights, which is evaluated, keeps of itself in a step; 0: none."""
    clip_grad: NonNegative = 1.0
    """Largest norm of the gradient over all parameters; 0 does not clip."""
    adam_beta1: ShareBelowOne = 0.9
    """Decay of the gradient's running mean, of adamw and lamb."""
    adam_beta2: ShareBelowOne = 0.999
    """Decay of the squared gradient's running mean, of adamw and lamb."""
    sgd_momentum: ShareBelowOne = 0.9
    """Share of the last step that sgd takes again; 0 keeps no state."""

    def state_kinds(self) -> tuple[str, ...]:
        """Kinds of state that the optimizer keeps of each parameter."""
        recipe = OPTIMIZERS[self.optimizer]
        return recipe.state(**{name: getattr(self, name) for name in recipe.flags})

    def decay_of(self, dimensions: int) -> float:
        """Weight decay of a parameter: matrices and kernels decay, and norms, biases and time constants do not."""
        return self.weight_decay if dimensions > 1 else 0.0

    def working_bytes(self, parameters: int) -> int:
        """Bytes that a step of the optimizer takes beside its state, for so many bytes of parameters."""
        return int(OPTIMIZERS[self.optimizer].working_copies * parameters)

    def warmup_iterations(self, epoch: Fraction = Fraction(1)) -> int | Fraction:
        """Iterations of warm-up, with `epoch` of them in an epoch."""
        if not self.lr_warmup_epochs:
            return self.lr_warmup_iters
        warm_up = self.lr_warmup_epochs * epoch
        return warm_up if self.lr_interval == "epoch" else int(warm_up)

    def lr_scale_patterns(self) -> list[Pattern]:
        """Patterns of `--lr-scale-of`. Raises ValueError for another text."""
        return patterns("lr_scale_of", self.lr_scale_of)

    def lr_scale(self, name: str) -> float:
        """Multiple of the learning rate of a parameter; 0 where it is frozen."""
        pattern = last_match(self.lr_scale_patterns(), name)
        return 1.0 if pattern is None else pattern.value

    def problems(self) -> list[str]:
        """Contradictions, with values and flags."""
        wrong = flags_of_others(self, "optimizer", OPTIMIZERS)
        if malformed := refusal(self.lr_scale_patterns):
            wrong += malformed
        else:
            wrong += [
                f"--lr-scale-of {each.text}={each.value:g} must be a finite number from 0 on"
                for each in self.lr_scale_patterns()
                if not 0 <= each.value < math.inf
            ]
        for name in ("min_lr", "lr_warmup_init"):
            if (rate := getattr(self, name)) is not None and rate > self.lr:
                wrong.append(f"{flag(name)} {rate} is greater than --lr {self.lr}")
        if DECAY_STYLES[self.lr_decay_style](1.0) == 1.0:
            wrong += [
                f"{flag(name)} {getattr(self, name)} has no meaning with --lr-decay-style {self.lr_decay_style}"
                for name in ("min_lr", "lr_cooldown_epochs")
                if getattr(self, name)
            ]
        iters, epochs = f"--lr-warmup-iters {self.lr_warmup_iters}", f"--lr-warmup-epochs {self.lr_warmup_epochs}"
        if self.lr_warmup_iters and self.lr_warmup_epochs:
            wrong.append(f"give either {iters} or {epochs}")
        elif self.lr_interval == "epoch" and self.lr_warmup_iters:
            wrong.append(f"--lr-interval epoch takes the warm-up in epochs: --lr-warmup-epochs, not {iters}")
        if self.lr_warmup_init is not None and not (self.lr_warmup_iters or self.lr_warmup_epochs):
            wrong.append(f"--lr-warmup-init {self.lr_warmup_init} needs --lr-warmup-iters or --lr-warmup-epochs")
        return wrong
