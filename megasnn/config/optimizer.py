"""The optimizer, its learning rate over time, and gradient clipping.

The registries of optimizers and decay styles stand beside their flags. torch is imported when one is built.
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
from megasnn.config.checks import (
    Count,
    FractionAboveZero,
    FractionBelowOne,
    NonNegative,
    Positive,
    as_flag,
    flag,
    refusal,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

ADAMW_EPS = 1e-8  # as in torch and Megatron-LM
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_ADAM = ("adam_beta1", "adam_beta2", "adam_eps")
_SGD = ("sgd_momentum", "sgd_nesterov")


@plain_dataclass(frozen=True)
class OptimizerRecipe:
    """An element-wise optimizer: an element's step needs its value, gradient, state, and tensor norms.

    Attributes:
        summary: for --help.
        build: (parameter groups with weight decay, lr=..., one keyword for each of `options`) -> optimizer.
        state: a parameter's entries in the optimizer's `state` after a step. `step` is a single number, all others
            have the parameter's shape and type.
        takes_norms: `build` also takes `norms`, of whole tensors (megasnn.optim.norms.ShardedNorms).
        takes_found_inf: with `fused` groups, a step changes nothing if the attribute `found_inf`, a float on the
            device, is 1. torch's GradScaler works this way too. A GPU then does not wait for the host.
        working_copies: a step's memory beside the state, in multiples of the parameters' bytes.
        options: `OptimizerConfig` fields that `build` takes, such as "adam_beta1".
    """

    summary: str
    build: Callable[..., Optimizer]
    state: tuple[str, ...]
    takes_norms: bool = False
    takes_found_inf: bool = False
    working_copies: float = 0.0
    options: tuple[str, ...] = ()


def _adamw(
    groups: Sequence[dict[str, Any]], lr: float, adam_beta1: float, adam_beta2: float, adam_eps: float | None
) -> Optimizer:
    import torch

    eps = ADAMW_EPS if adam_eps is None else adam_eps
    # Only torch's fused step takes found_inf.
    return torch.optim.AdamW(groups, lr=lr, betas=(adam_beta1, adam_beta2), eps=eps, fused=True)


def _sgd(groups: Sequence[dict[str, Any]], lr: float, sgd_momentum: float, sgd_nesterov: bool) -> Optimizer:
    import torch

    return torch.optim.SGD(groups, lr=lr, momentum=sgd_momentum, nesterov=sgd_nesterov)


OPTIMIZERS: Registry[OptimizerRecipe] = Registry(
    "--optimizer",
    {
        "adamw": OptimizerRecipe("arXiv 1711.05101", _adamw, _MOMENTS, takes_found_inf=True, options=_ADAM),
        # torch's fused SGD does not take found_inf: if the first step is skipped, its momentum is uninitialised memory
        # (findings/torch_fused_sgd_skipped_step.sh).
        "sgd": OptimizerRecipe("as torch's", _sgd, ("momentum_buffer",), options=_SGD),
        "lamb": OptimizerRecipe(
            "arXiv 1904.00962, in timm's form",
            later("megasnn.optim.lamb:build_lamb"),
            _MOMENTS,
            takes_norms=True,
            working_copies=4,  # updates, factors in the type of the weights, and their 8-byte indices
            options=_ADAM,
        ),
    },
)

# Fraction of the decay that is done, 0 to 1 -> height between --min-lr (0) and --lr (1).
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
    adam_beta1: FractionBelowOne = 0.9
    """Decay of the first moment, for adamw and lamb."""
    adam_beta2: FractionBelowOne = 0.999
    """Decay of the second moment, for adamw and lamb."""
    adam_eps: Positive | None = None
    """Term added to the denominator of the update; by default 1e-8 for adamw and 1e-6 for lamb."""
    sgd_momentum: FractionBelowOne = 0.9
    """Momentum of sgd; 0 keeps no state."""
    sgd_nesterov: bool = False
    """Use Nesterov momentum in sgd."""
    lr: Positive = 1e-3
    """Learning rate after the warm-up."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Annotated[str, DECAY_STYLES] = "cosine"
    """Decay of the learning rate from --lr to --min-lr."""
    lr_warmup_iters: Count = 0
    """Iterations of linear warm-up."""
    lr_warmup_epochs: Count = 0
    """Epochs of linear warm-up, instead of --lr-warmup-iters."""
    lr_warmup_init: NonNegative | None = None
    """Learning rate of the first step; by default --lr divided by the steps of warm-up."""
    lr_cooldown_epochs: Count = 0
    """Epochs at the end of the training with --min-lr."""
    lr_interval: Literal["iteration", "epoch"] = "iteration"
    """Change the rate every iteration or every epoch; epoch is timm's schedule, whose decay counts from the start."""
    weight_decay: NonNegative = 0.01
    """Weight decay; not for norms, biases and time constants."""
    ema_decay: FractionBelowOne = 0.0
    """Decay of the moving average of the weights, which evaluation uses; 0 disables it."""
    layer_decay: FractionAboveZero = 1.0
    """Decay of the learning rate by depth, as in timm: each layer group trains at this factor times the rate of the
    group after it. The last layer group keeps the full rate; 1 gives all layers the same."""
    lr_scale: str | None = None
    """Factors of the learning rate by parameter name, "head.*=10,*.bias=2". Factors of several matching patterns
    multiply; 0 keeps a parameter unchanged."""
    clip_grad: NonNegative = 1.0
    """Largest gradient norm over all parameters; 0 disables clipping."""

    def warmup_iterations(self, epoch: Fraction = Fraction(1)) -> int | Fraction:
        """In iterations. Args: epoch: iterations in an epoch."""
        if not self.lr_warmup_epochs:
            return self.lr_warmup_iters
        warm_up = self.lr_warmup_epochs * epoch
        # A rate that changes every iteration counts whole iterations.
        return warm_up if self.lr_interval == "epoch" else int(warm_up)

    @property
    def build_options(self) -> dict[str, Any]:
        """Keyword arguments for `OptimizerRecipe.build`."""
        return {name: getattr(self, name) for name in OPTIMIZERS[self.optimizer].options}

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """`OptimizerRecipe.state` of this optimizer. SGD without momentum keeps none."""
        is_stateless = self.optimizer == "sgd" and not self.sgd_momentum
        return () if is_stateless else OPTIMIZERS[self.optimizer].state

    @property
    def name_scales(self) -> dict[str, float]:
        """Factors by pattern. Raises ValueError as `parse_scales`."""
        return parse_scales(self.lr_scale) if self.lr_scale is not None else {}

    def problems(self) -> list[str]:
        """Contradictions, with values and flags."""
        wrong = self._option_problems() + refusal(lambda: self.name_scales)
        for name in ("min_lr", "lr_warmup_init"):
            rate = getattr(self, name)
            if rate is not None and rate > self.lr:
                wrong.append(f"{flag(name)} {rate} is greater than --lr {self.lr}")
        iters = f"--lr-warmup-iters {self.lr_warmup_iters}"
        epochs = f"--lr-warmup-epochs {self.lr_warmup_epochs}"
        if self.lr_warmup_iters and self.lr_warmup_epochs:
            wrong.append(f"give either {iters} or {epochs}")
        elif self.lr_interval == "epoch" and self.lr_warmup_iters:
            wrong.append(f"--lr-interval epoch takes the warm-up in epochs: --lr-warmup-epochs, not {iters}")
        return wrong

    def _option_problems(self) -> list[str]:
        """Options of other optimizers, and Nesterov without momentum."""
        recipe = OPTIMIZERS[self.optimizer]
        wrong = []
        for name in (*_ADAM, *_SGD):
            value = getattr(self, name)
            # A dataclass keeps a field's default as an attribute of the class.
            if name not in recipe.options and value != getattr(type(self), name):
                able = " and ".join(each for each, other in OPTIMIZERS.items() if name in other.options)
                asked = as_flag(name, value)
                wrong.append(f"{asked} is for {able}, not for --optimizer {self.optimizer}; leave it out")
        if self.sgd_nesterov and not self.sgd_momentum:
            wrong.append("--sgd-nesterov needs --sgd-momentum above 0, got 0")
        return wrong


def parse_scales(text: str) -> dict[str, float]:
    """Factors by pattern, from text like "head.*=10,*.bias=2". Raises ValueError for a malformed one."""
    scales: dict[str, float] = {}
    for part in text.split(","):
        pattern, _, factor = part.rpartition("=")
        pattern = pattern.strip()
        try:
            scale = float(factor)
        except ValueError:
            scale = math.nan
        if not pattern or not 0 <= scale < math.inf:
            raise ValueError(f'--lr-scale {part!r} must be a pattern and a factor of 0 or more, as "head.*=10"')
        if pattern in scales:
            raise ValueError(f"--lr-scale has two factors for {pattern!r}: {scales[pattern]:g} and {scale:g}")
        scales[pattern] = scale
    return scales
