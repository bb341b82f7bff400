"""Loss and metrics of the micro-batches of a training step."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megasnn.common.bundle import Bundle
from megasnn.config import PretrainConfig
from megasnn.config.training import LOSSES
from megasnn.engine.windows import WindowOutputs
from megasnn.models.task import Task


class MicroBatchLoss:
    """Share of a micro-batch in the global batch's mean loss, and sums of its metrics.

    Args:
        counts: True on one of the ranks that have the same logits; the others give a loss of 0 and its gradient.
        device: of the logits.
    Attributes:
        of_samples: (output of the model, targets) -> sum of the samples' losses.
        of_evaluation: the same without label smoothing, as published logs have it.
        windows: joins outputs of the windows of a micro-batch; None where each micro-batch has all time steps.
        metrics: sums over the step's samples of this rank, float64 `[metrics]`.
    """

    def __init__(self, config: PretrainConfig, task: Task, counts: bool, device: torch.device) -> None:
        training = config.training
        named = LOSSES[training.loss].sum
        self.of_samples = task.summed_loss(partial(named, label_smoothing=training.label_smoothing))
        self.of_evaluation = task.summed_loss(named)
        self.windows = WindowOutputs(config.windows) if config.windows > 1 else None
        self.metrics = torch.zeros(len(task.trained), dtype=torch.float64, device=device)
        self._task = task
        self._counts = counts
        self._parts = 1
        self._windows = config.windows

    def begin(self, global_batch_size: int) -> None:
        """Begins a step on so many samples."""
        self._parts = global_batch_size * self._windows
        self.metrics.zero_()

    def __call__(self, output: Bundle, targets: Tensor, again: bool) -> Tensor:
        """Loss of a micro-batch, or of a window of it. Metrics are not counted when it is computed `again`."""
        loss = self.of_samples(output, targets) / self._parts
        if not again:
            whole = output if self.windows is None else self.windows.complete(output)
            if whole is not None:
                self.metrics += self._task.sums(whole, targets, self._task.trained)
        return loss if self._counts else 0 * loss
