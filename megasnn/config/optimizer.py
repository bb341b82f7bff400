"""The optimizer, its learning rate over time, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Literal

from megasnn.config.checks import FOR_RUNS, above, at_least, flag, from_zero_to_below_one, refusal
from megasnn.config.names import flags_of_others, name_in
from megasnn.config.patterns import Pattern, last_match, patterns
from megasnn.optimizers import DECAY_STYLES, OPTIMIZERS, Stepped


@dataclass(frozen=True)
class OptimizerConfig:
    """Linear warm-up to `lr`, then decay to `min_lr` at the end of the training."""

    optimizer: Annotated[str, name_in(OPTIMIZERS)] = "adamw"
    """Update rule of the weights."""
    lr: float = 1e-3
    """Highest learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Annotated[str, name_in(DECAY_STYLES)] = "cosine"
    """Course of the learning rate from --lr to --min-lr, or constant."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a share of all iterations, instead of --lr-warmup-iters."""
    lr_warmup_epochs: int = field(default=0, metadata=FOR_RUNS)
    """Epochs of warm-up, instead of --lr-warmup-iters."""
    lr_warmup_init: float | None = None
    """Learning rate of the first step of the warm-up; by default --lr divided by the steps of the warm-up."""
    lr_cooldown_epochs: int = field(default=0, metadata=FOR_RUNS)
    """Epochs at the end of the training that stay at --min-lr."""
    lr_interval: Literal["iteration", "epoch"] = field(default="iteration", metadata=FOR_RUNS)
    """How long a learning rate stays: one iteration, or all those of an epoch as in timm's recipes."""
    lr_decay_from: Literal["warmup", "start"] = "warmup"
    """What the decay is counted from: the end of the warm-up; or the start of the training as in timm's recipes, where
    the warm-up takes the place of its first part."""
    weight_decay: float = 0.01
    """Decay of the weights in a step; not applied to norms, biases and time constants."""
    freeze: str | None = None
    """Parameters that are not trained, as patterns of their names: "patch_embed.*,blocks.0.*". The running statistics
    of frozen layers' norms go on."""
    lr_scale_of: str | None = None
    """Learning rates of some parameters, as multiples of the others': "patch_embed.*=0.1,blocks.*=0.5". Of several
    patterns that match, the last one counts."""
    weight_decay_of: str | None = None
    """Weight decay of some parameters, in place of --weight-decay: "head.*=0"; "*=1e-4" decays all of them."""
    ema_decay: float | None = None
    """Keep a running average of the weights, and evaluate it in their place: after each step it is this share of what
    it was, and the rest is the weights. By default there is none."""
    clip_grad: float = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""
    adam_beta1: float = 0.9
    """Of adamw and lamb: decay of the gradient's running mean."""
    adam_beta2: float = 0.999
    """Of adamw and lamb: decay of the squared gradient's running mean."""
    adam_eps: float = 1e-8
    """Of adamw and lamb: added to the denominator; timm's LAMB has 1e-6."""
    sgd_momentum: float = 0.9
    """Of sgd: share of the last step that is taken again; 0 keeps no state."""
    sgd_nesterov: bool = False
    """Of sgd: look ahead by the momentum, as torch's SGD does."""

    def state_kinds(self) -> tuple[str, ...]:
        """The kinds of state that the optimizer keeps of each parameter."""
        recipe = OPTIMIZERS[self.optimizer]
        return recipe.state(**{name: getattr(self, name) for name in recipe.flags})

    def decay_of(self, name: str, dimensions: int) -> float:
        """The weight decay of a parameter. Where no pattern says otherwise, matrices and kernels decay, and norms,
        biases and time constants do not."""
        pattern = last_match(self.weight_decay_patterns(), name)
        if pattern is not None:
            return pattern.value
        return self.weight_decay if dimensions > 1 else 0.0

    def working_bytes(self, parameters: Sequence[Stepped]) -> int:
        """What a step of the optimizer takes meanwhile, see `OptimizerRecipe.working`."""
        return OPTIMIZERS[self.optimizer].working(parameters)

    def warmup_iterations(self, iterations: int, epoch: Fraction = Fraction(1)) -> int | Fraction:
        """Iterations of warm-up in a training of so many, with `epoch` of them in an epoch."""
        if self.lr_warmup_fraction is not None:
            return int(self.lr_warmup_fraction * iterations)
        if self.lr_warmup_epochs:
            warm_up = self.lr_warmup_epochs * epoch
            return warm_up if self.lr_interval == "epoch" else int(warm_up)
        return self.lr_warmup_iters

    def frozen_patterns(self) -> list[Pattern]:
        """Of `--freeze`. This and the next two raise ValueError for a text that is none of patterns."""
        return patterns("freeze", self.freeze, with_values=False)

    def lr_scale_patterns(self) -> list[Pattern]:
        return patterns("lr_scale_of", self.lr_scale_of)

    def weight_decay_patterns(self) -> list[Pattern]:
        return patterns("weight_decay_of", self.weight_decay_of)

    def problems(self) -> list[str]:
        wrong = above(self, 0, "lr", "adam_eps")
        wrong += at_least(self, 0, "min_lr", "lr_warmup_iters", "lr_warmup_epochs", "lr_warmup_init")
        wrong += at_least(self, 0, "lr_cooldown_epochs", "weight_decay", "clip_grad")
        wrong += from_zero_to_below_one(self, "lr_warmup_fraction", "adam_beta1", "adam_beta2", "sgd_momentum")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            wrong.append(f"--ema-decay must be above 0 and below 1, got {self.ema_decay}")
        if self.min_lr > self.lr:
            wrong.append(f"--min-lr {self.min_lr} is greater than --lr {self.lr}")
        wrong += flags_of_others(self, "optimizer", OPTIMIZERS) + self._pattern_problems()
        if self.sgd_nesterov and self.sgd_momentum == 0:
            wrong.append("--sgd-nesterov needs a --sgd-momentum above 0")
        return wrong + self._course_problems()

    def _course_problems(self) -> list[str]:
        """Of the learning rate's course."""
        wrong = []
        if DECAY_STYLES[self.lr_decay_style](1.0) == 1.0:
            style = f"--lr-decay-style {self.lr_decay_style}"
            if self.min_lr > 0:
                wrong.append(f"--min-lr {self.min_lr} is never reached with {style}")
            if self.lr_cooldown_epochs:
                wrong.append(f"--lr-cooldown-epochs {self.lr_cooldown_epochs} has no meaning with {style}")
            if self.lr_decay_from == "start":
                wrong.append(f"--lr-decay-from start has no meaning with {style}")
        lengths = {name: getattr(self, name) for name in ("lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_epochs")}
        given = {flag(name): value for name, value in lengths.items() if value}
        if len(given) > 1:
            values = " and ".join(map(str, given.values()))
            wrong.append(f"give either {' or '.join(given)}, not several of them ({values})")
        if not given and self.lr_warmup_init is not None:
            wrong.append(f"--lr-warmup-init {self.lr_warmup_init} needs a warm-up: {', '.join(map(flag, lengths))}")
        if not given and self.lr_decay_from == "start":
            wrong.append(f"--lr-decay-from start needs a warm-up: {', '.join(map(flag, lengths))}")
        if self.lr_warmup_init is not None and self.lr_warmup_init > self.lr:
            wrong.append(f"--lr-warmup-init {self.lr_warmup_init} is greater than --lr {self.lr}")
        if self.lr_interval == "epoch" and (self.lr_warmup_iters or self.lr_warmup_fraction):
            wrong.append("--lr-interval epoch takes the warm-up in epochs: --lr-warmup-epochs")
        return wrong

    def _pattern_problems(self) -> list[str]:
        read = (self.frozen_patterns, self.lr_scale_patterns, self.weight_decay_patterns)
        if malformed := [problem for each in read for problem in refusal(each)]:
            return malformed
        wrong = [
            f"--lr-scale-of: {each.text}={each.value:g} must be a finite number above 0; --freeze is for what stays"
            for each in self.lr_scale_patterns()
            if not 0 < each.value < math.inf
        ]
        return wrong + [
            f"--weight-decay-of: {each.text}={each.value:g} must be a finite number of at least 0"
            for each in self.weight_decay_patterns()
            if not 0 <= each.value < math.inf
        ]
