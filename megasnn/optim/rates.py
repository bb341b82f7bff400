"""The learning rate over the course of a training."""

from __future__ import annotations

from megasnn.config.optimizer import OptimizerConfig
from megasnn.optimizers import DECAY_STYLES


def learning_rate(config: OptimizerConfig, iteration: int, iterations: int) -> float:
    """The rate of step `iteration` (from 0): linear warm-up, then `--lr-decay-style` to min_lr."""
    warm_up = config.warmup_iterations(iterations)
    if iteration < warm_up:
        return config.lr * (iteration + 1) / warm_up
    progress = min((iteration - warm_up) / max(iterations - warm_up, 1), 1.0)
    return config.min_lr + (config.lr - config.min_lr) * DECAY_STYLES[config.lr_decay_style](progress)
