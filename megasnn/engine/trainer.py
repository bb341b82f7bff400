"""Optimizer steps: forward and backward of all micro-batches, clip, update, average."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from megasnn.common import checks
from megasnn.common.grid import micro_batch_counts
from megasnn.config import PretrainConfig
from megasnn.data import RankBatch
from megasnn.engine.batch import BatchError
from megasnn.engine.calibration import Calibration
from megasnn.engine.model import DistributedModel
from megasnn.engine.not_finite import locate_not_finite
from megasnn.optim.average import WeightAverage
from megasnn.optim.build import build_optimizer, takes_found_inf
from megasnn.optim.scales import learning_rate_scales
from megasnn.pipeline.microbatch_state import MicroBatchInput
from megasnn.telemetry.records import StepResult
from megasnn.telemetry.timers import Timers

_OVERFLOW = "values too large for their type, in statistics of a norm or in squares of gradients; the step is skipped"
_CHANGED = (
    "lr or params in the optimizer's param_groups were changed, and each step sets the rate itself: give Engine(..., "
    "lr_schedule=...), a function of the step; a group's own share of the rate is its lr_scale"
)


class Trainer:
    """Takes optimizer steps: optimizer, learning rate, moving average and position in the training.

    Args:
        rate: step, counted from 0 -> learning rate.
        iterations: training length in steps; a run sets it again after loading a checkpoint.
    Attributes:
        average: moving average of this rank's parameters or shards; None without `ema_decay`.
    """

    def __init__(
        self, config: PretrainConfig, distributed: DistributedModel, rate: Callable[[int], float], iterations: int
    ) -> None:
        self.distributed = distributed
        scales = learning_rate_scales(config.optimizer, distributed.description)
        groups = distributed.state.holding_groups
        # With ZeRO-1 `owned` are shards, views of the parameters (GradientBuckets.owned_part).
        self.optimizer = build_optimizer(distributed.owned, config.optimizer, groups, scales)
        decay = config.optimizer.ema_decay
        self.average = None
        # With --evaluate-only the loaded weights may be averages themselves.
        if decay and not config.training.evaluate_only:
            self.average = WeightAverage(distributed.owned, decay)
        self.calibration = Calibration(distributed)
        self.timers = Timers(distributed.state.device)
        self.iteration = 0
        self.consumed_samples = 0
        self._config = config
        self._rate = rate
        self.iterations = iterations
        self._micro_batch_size = config.training.micro_batch_size
        self._replicas = distributed.state.dp.size
        self._windows = config.windows
        self._groups_set = self._groups()
        self._takes_found_inf = takes_found_inf(self.optimizer, config.optimizer)

    def take_step(self, micro_batches: Sequence[MicroBatchInput], batch: RankBatch) -> StepResult:
        """Takes one step on this replica's micro-batches. Collective.

        A step that is not finite changes only the position.

        Raises:
            BatchError: all steps are done.
            ValueError: a negative or infinite learning rate, or findings on any rank.
        """
        if self.iteration >= self.iterations:
            raise BatchError(f"all {self.iterations} steps are done (train_iters); make an Engine with more")
        distributed = self.distributed
        schedule_step = self.iteration
        training = self._config.training
        if training.train_samples is not None or training.train_epochs is not None:
            # Earlier steps may have had another batch size.
            schedule_step = self.consumed_samples // training.global_batch_size
        rate = self._rate(schedule_step)
        if not 0 <= rate < math.inf:
            raise ValueError(f"the learning rate of step {self.iteration} is {rate}: lr_schedule must give 0 or more")
        # On a GPU the optimizer is launched before the host has read the sums: the device never waits for the host, and
        # skips a step with `must_skip` by itself.
        updates_before_reading = self._takes_found_inf and checks.runs_ahead(distributed.context.state.device)
        if not self.calibration.is_done and self.calibration.is_due():
            self.calibration.run(micro_batches)
        with self.timers("forward_backward"):
            # Zeroes gradients; forward, backward and reductions by schedule.
            sums = distributed.run(micro_batches, batch.size)
        with self.timers("optimizer"):
            if updates_before_reading:
                self._update(rate, sums.norm, sums.must_skip)
            # The host waits for the device here, once a step.
            figures = distributed.read(sums)
            if figures.is_finite:
                counts = micro_batch_counts(batch.size, self._micro_batch_size, self._replicas, self._windows)
                distributed.running_statistics.merge(counts.most)
                # With the host's norm: an optimizer without found_inf must not start a step to skip.
                if not updates_before_reading:
                    self._update(rate, figures.grad_norm)
                distributed.refresh_copies()
                if self.average is not None:
                    self.average.update()
        not_finite = None
        if not figures.is_finite:
            not_finite = locate_not_finite(distributed, micro_batches) or _OVERFLOW
        # A skipped step counts: the rate and the order of samples do not depend on it.
        self.iteration += 1
        self.consumed_samples = batch.consumed_samples
        return StepResult(
            loss=figures.loss,
            sums=dict(zip(distributed.description.task.trained, figures.values["metrics"], strict=True)),
            samples=batch.size,
            grad_norm=figures.grad_norm,
            learning_rate=rate,
            skipped=not figures.is_finite,
            not_finite=not_finite,
        )

    def _update(self, rate: float, norm: float | Tensor, must_skip: Tensor | None = None) -> None:
        self.distributed.gradient_norm.clip(norm, self._config.optimizer.clip_grad, must_skip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        self._groups_set = self._groups()
        # torch's fused steps read it on the device, and change nothing where it is 1.
        if self._takes_found_inf:
            self.optimizer.found_inf = None if must_skip is None else must_skip.float()  # type: ignore[attr-defined]
        self.optimizer.step()

    def outside_change(self) -> str | None:
        """Error text where the optimizer's rates or parameters were changed from outside."""
        return None if self._groups() == self._groups_set else _CHANGED

    def _groups(self) -> list[tuple[object, ...]]:
        return [(group["lr"], *map(id, group["params"])) for group in self.optimizer.param_groups]

    def after_loading(self, position: tuple[int, int] | None = None, averaged_steps: int | None = None) -> None:
        """Adopts loaded weights. Collective.

        Args:
            position: loaded iteration and consumed samples; None keeps the current ones.
            averaged_steps: a loaded moving average's steps; None restarts it.
        """
        self.distributed.refresh_copies()
        self.calibration.after_loading()
        if self.average is not None and averaged_steps is None:
            self.average.restart()
        elif self.average is not None and averaged_steps is not None:
            self.average.steps = averaged_steps
        if position is not None:
            self.iteration, self.consumed_samples = position

    def exchange_average(self) -> None:
        """Swaps weights and their moving average. Collective."""
        assert self.average is not None
        self.average.exchange()
        self.distributed.refresh_copies()
