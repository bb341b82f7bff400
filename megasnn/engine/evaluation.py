"""Outputs of an evaluation: sums of loss and metrics, and a prediction's answers."""

from __future__ import annotations

import torch
from torch import Tensor

from megasnn.common.bundle import Bundle
from megasnn.engine.model import DistributedModel


class EvaluationSums:
    """Sums of loss and metrics over all evaluated samples."""

    def __init__(self, distributed: DistributedModel) -> None:
        self._distributed = distributed
        self._task = distributed.description.task
        # Loss, samples and metrics. On the device, so that the host waits only at the end.
        self._totals = torch.zeros(2 + len(self._task.evaluated), dtype=torch.float64, device=distributed.state.device)

    def add(self, output: Bundle, targets: Tensor) -> None:
        self._totals[0] += self._distributed.loss.evaluation_loss(output, targets)
        if self._distributed.context.counts_samples:
            self._totals[1] += len(targets)
        self._totals[2:] += self._task.sums(output, targets, self._task.evaluated)

    def read(self) -> tuple[int, float, dict[str, float]]:
        """Samples, mean loss and mean metrics over all ranks; zeros without samples. Collective."""
        loss, samples, *sums = self._distributed.sum_over_replicas(self._totals).tolist()
        divisor = samples or 1.0
        metrics = {name: each / divisor for name, each in zip(self._task.evaluated, sums, strict=True)}
        return int(samples), loss / divisor, metrics


class Answers:
    """A prediction's answers, by sample."""

    def __init__(self, distributed: DistributedModel, samples: int) -> None:
        self._distributed = distributed
        self._task = distributed.description.task
        empty = self._task.answer.empty(samples, distributed.context.numerics.dtype)
        self._answers = torch.zeros_like(empty, device=distributed.state.device)

    def fill(self, output: Bundle, indices: Tensor) -> None:
        """Raises ValueError for a part of an answer."""
        own = self._task.answers_of(output)
        wanted = self._answers.shape[1:]
        if own.shape[1:] != wanted:
            raise ValueError(
                f"a rank's answers are {[*own.shape]} and the whole ones [N, ...] of {[*wanted]}: an answer for each "
                "token needs --context-parallel-cut samples"
            )
        self._answers[indices] = own.to(self._answers.dtype)

    def gathered(self) -> Tensor:
        """All answers, on every rank's CPU. Collective."""
        # Each row is an answer on one rank and zeros on all others, so that the sum joins them. Of ranks that divide
        # tokens, each has its part of the answer.
        return self._distributed.sum_over_replicas(self._answers).cpu()
