"""Learning rate schedule."""

from __future__ import annotations

from fractions import Fraction

from megasnn.common.files import quantity
from megasnn.config.optimizer import DECAY_STYLES, OptimizerConfig


def learning_rate(config: OptimizerConfig, iteration: int, iterations: int, epoch: Fraction = Fraction(1)) -> float:
    """Rate for step `iteration` (from 0): linear warm-up, `--lr-decay-style` to min_lr, then min_lr.

    `epoch` is in iterations.
    """
    interval = epoch if config.lr_interval == "epoch" else Fraction(1)
    done = iteration // interval * interval  # iterations before this interval
    warm_up = config.warmup_iterations(epoch)
    if done < warm_up and config.lr_warmup_init is not None:
        return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * float(done / warm_up)
    if done < warm_up:
        return config.lr * float(done + interval) / float(warm_up)
    # timm's schedule by epochs decays from the start of the training.
    begin = 0 if config.lr_interval == "epoch" else warm_up
    # An epoch is a fraction of iterations: the training may end before its last epoch does.
    end = -(-iterations // interval) * interval
    length = end - config.lr_cooldown_epochs * epoch - begin
    progress = min(float((done - begin) / max(length, Fraction(1))), 1.0)
    return config.min_lr + (config.lr - config.min_lr) * DECAY_STYLES[config.lr_decay_style](progress)


def require_schedule(config: OptimizerConfig, iterations: int, epoch: Fraction) -> None:
    """Raises ValueError if warm-up and cool-down together exceed the training."""
    cooldown = config.lr_cooldown_epochs * epoch
    if config.warmup_iterations(epoch) + cooldown > iterations:
        raise ValueError(
            f"warm-up (--lr-warmup-epochs {config.lr_warmup_epochs}, --lr-warmup-iters {config.lr_warmup_iters}) and "
            f"cool-down (--lr-cooldown-epochs {config.lr_cooldown_epochs}) take more than the training's "
            f"{quantity(iterations, 'iteration')}, with {float(epoch):g} in an epoch: lower them, or raise "
            "--train-iters or --train-epochs"
        )
