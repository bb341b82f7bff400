"""One optimizer step of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from megasnn.augment.mixing import Mixing
from megasnn.batching import micro_batches_of
from megasnn.config import PretrainConfig
from megasnn.config.training import Length
from megasnn.data import GlobalBatch
from megasnn.engine import Engine
from megasnn.grid import HOLDING_AXES
from megasnn.non_finite import earliest
from megasnn.optim import WeightAverage, build_optimizer, learning_rate
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.executor import MicroBatchInput
from megasnn.telemetry.logline import StepResult
from megasnn.telemetry.timers import Timers


class TrainingStep:
    """Forward, backward, clipping and update, on this rank.

    Args:
        mixing: of the samples of each micro-batch; None where they stay as they are.

    Attributes:
        optimizer: of this rank's parameters.
        average: of this rank's weights; None without --ema-decay.
    """

    def __init__(
        self,
        config: PretrainConfig,
        engine: Engine,
        state: ParallelState,
        timers: Timers,
        length: Length,
        mixing: Mixing | None = None,
    ) -> None:
        self._config, self._engine, self._state, self._timers = config, engine, state, timers
        self._length, self._mixing = length, mixing
        groups = {axis: state.group(axis) for axis in HOLDING_AXES}
        self.optimizer = build_optimizer(engine.tensors, config.optimizer, groups)
        decay = config.optimizer.ema_decay
        self.average = None if decay is None else WeightAverage(engine.tensors, decay)

    def __call__(self, batch: GlobalBatch, iteration: int) -> StepResult:
        """Trains on one global batch; a step that is not finite changes nothing.

        Args:
            iteration: steps done before this one.
        """
        engine, options = self._engine, self._config.optimizer
        micro_batches = [self._mixed(micro_batch) for micro_batch in self.inputs(batch)]
        with self._timers("forward_backward"):
            loss = engine.forward_backward(micro_batches, batch.size)
        with self._timers("optimizer"):
            norm = engine.gradient_norm()
            rate = learning_rate(options, iteration, self._length.iterations, self._length.epoch)
            correct, finite = engine.correct, math.isfinite(norm) and math.isfinite(loss)
            # A skipped step leaves everything as it was: weights, optimizer state and running statistics.
            if finite:
                engine.merge_statistics(self._most_micro_batches(batch.size))
                engine.gradient_norm.clip(norm, options.clip_grad)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate * group["lr_scale"]
                self.optimizer.step()
                engine.refresh_copies()
                if self.average is not None:
                    self.average.update()
        where = None if finite else self._first_non_finite(micro_batches)
        return StepResult(loss, correct, batch.size, norm, rate, not finite, where)

    def inputs(self, batch: GlobalBatch) -> list[MicroBatchInput]:
        """The batch on this rank's device, in the type that the model computes in."""
        device, dtype = self._state.device, self._dtype()
        begin = batch.consumed_samples - batch.size
        return [
            MicroBatchInput(
                None if micro.images is None else micro.images.to(device, dtype, non_blocking=True),
                None if micro.labels is None else micro.labels.to(device),
                micro.size,
                range(begin + micro.start, begin + micro.start + micro.size),
            )
            for micro in batch.micro_batches
        ]

    def _mixed(self, micro: MicroBatchInput) -> MicroBatchInput:
        if self._mixing is None or micro.samples is None:
            return micro
        first = micro.samples.start
        images = None if micro.images is None else self._mixing.images(micro.images, first)
        labels = None if micro.labels is None else self._mixing.labels(micro.labels, first)
        return replace(micro, images=images, labels=labels)

    def _dtype(self) -> torch.dtype:
        return self._engine.context.dtype

    def _most_micro_batches(self, batch_size: int) -> int:
        count = -(-batch_size // self._config.training.micro_batch_size)
        return len(micro_batches_of(count, self._state.data.size, 0))

    def _first_non_finite(self, micro_batches: Sequence[MicroBatchInput]) -> str | None:
        """In which layer's output it appeared first, otherwise in which gradient; collective."""
        world = self._state.world.handle
        chunk, found = self._engine.first_non_finite_output(micro_batches) or (0, None)
        where = earliest(found, chunk, world)
        if where is not None:
            return f"not finite in forward, first in {where}"
        # Backward runs from the last chunk to the first.
        chunk, found = self._engine.first_non_finite_gradient() or (0, None)
        where = earliest(found, -chunk, world)
        return (
            None if where is None else f"not finite in backward, first in the gradient of {where}; the step is skipped"
        )
