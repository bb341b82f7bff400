"""The loss of a micro-batch, as a share of the global batch's mean."""

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
    """A micro-batch's part in the global batch's mean loss, and its metric sums.

    Args:
        is_counted: False, with a loss and gradient of 0, on all but the first context-parallel rank with these logits.
            Tensor-parallel ranks all count: each needs the whole gradient.
    Attributes:
        training_loss: (model output, targets) -> summed loss.
        evaluation_loss: the same without label smoothing, as in published logs.
        windows: joins a micro-batch's windows; None where micro-batches have all time steps.
        metrics: sums over this rank's samples in the step, float64 `[metrics]`.
    """

    def __init__(self, config: PretrainConfig, task: Task, is_counted: bool, device: torch.device) -> None:
        training = config.training
        loss_sum = LOSSES[training.loss].sum
        self.training_loss = task.summed_loss(partial(loss_sum, label_smoothing=training.label_smoothing))
        self.evaluation_loss = task.summed_loss(loss_sum)
        self.windows = WindowOutputs(config.windows) if config.windows > 1 else None
        self.metrics = torch.zeros(len(task.trained), dtype=torch.float64, device=device)
        self._task = task
        self._is_counted = is_counted
        self._divisor = 1
        self._windows = config.windows

    def begin(self, global_batch_size: int) -> None:
        # By the whole batch on every rank, however many samples it has: gradients are then sums, not means of means.
        self._divisor = global_batch_size * self._windows
        self.metrics.zero_()

    def __call__(self, output: Bundle, targets: Tensor, is_recomputation: bool) -> Tensor:
        """For a micro-batch or one of its windows. Adds no metrics in a recomputation."""
        loss = self.training_loss(output, targets) / self._divisor
        if not is_recomputation:
            whole = output if self.windows is None else self.windows.complete(output)
            if whole is not None:
                self.metrics += self._task.sums(whole, targets, self._task.trained)
        # A context-parallel rank with the same logits runs its backward as well: the others meet it in collectives. Its
        # gradient is 0, and counts once in their sum.
        return loss if self._is_counted else 0 * loss
