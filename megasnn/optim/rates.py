"""Schedule of the learning rate over a training."""

from __future__ import annotations

from fractions import Fraction

from megasnn.config.optimizer import DECAY_STYLES, OptimizerConfig


def learning_rate(config: OptimizerConfig, iteration: int, iterations: int, epoch: Fraction = Fraction(1)) -> float:
    """Returns the rate of step `iteration` (from 0): linear warm-up, then `--lr-decay-style` to min_lr, then min_lr.

    Args:
        iterations: of the whole training.
        epoch: iterations of an epoch; see `Length`.
    """
    unit = epoch if config.lr_interval == "epoch" else Fraction(1)
    done = iteration // unit * unit  # iterations before those that have this rate
    warm_up = config.warmup_iterations(epoch)
    if done < warm_up and config.lr_warmup_init is not None:
        return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * float(done / warm_up)
    if done < warm_up:
        return config.lr * float(done + unit) / float(warm_up)
    begin = 0 if config.lr_interval == "epoch" else warm_up
    end = -(-iterations // unit) * unit  # the last epoch may end in the midst of a batch that is not trained on
    length = end - config.lr_cooldown_epochs * epoch - begin
    progress = min(float((done - begin) / max(length, Fraction(1))), 1.0)
    return config.min_lr + (config.lr - config.min_lr) * DECAY_STYLES[config.lr_decay_style](progress)


def require_schedule(config: OptimizerConfig, iterations: int, epoch: Fraction) -> None:
    """Raises ValueError where warm-up and cool-down together are longer than the training."""
    cooldown = config.lr_cooldown_epochs * epoch
    if config.warmup_iterations(epoch) + cooldown > iterations:
        raise ValueError(
            f"warm-up (--lr-warmup-epochs {config.lr_warmup_epochs}, --lr-warmup-iters {config.lr_warmup_iters}) and "
            f"--lr-cooldown-epochs {config.lr_cooldown_epochs} are together more than the {iterations} iterations of "
            f"the training, with {float(epoch):g} in an epoch; lower them, or raise --train-iters or --train-epochs"
        )
