"""Loss and gradients of a step, without an update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megasnn.bundle import Bundle, logits_of
from megasnn.engine.model import DistributedModel
from megasnn.losses.sums import correct_predictions
from megasnn.parallel.sync_batch_norm import merge_running_statistics
from megasnn.pipeline.microbatch_state import MicroBatchInput


def forward_backward(model: DistributedModel, micro_batches: Sequence[MicroBatchInput], samples: int) -> float:
    """Computes the global batch's loss, which it returns, and the reduced gradients."""
    model.check(model.run(micro_batches, samples))
    return model.mean_loss


def merge_statistics(model: DistributedModel, most_micro_batches: int) -> None:
    """Merges the step's records into the norms' running statistics."""
    merge_running_statistics(model.norms, model.state.dp, most_micro_batches, model.ties.statistics_of_owners)


def evaluated(model: DistributedModel, micro_batches: Sequence[MicroBatchInput]) -> list[float]:
    """Returns the sums of an evaluation over all replicas: losses, samples, correct in top 1, in top 5."""
    totals = torch.zeros(4, dtype=torch.float64)

    def count(output: Bundle, labels: Tensor) -> None:
        totals[0] += model.loss(output, labels)
        totals[1] += len(labels)
        totals[2:] += correct_predictions(logits_of(output), labels)

    model.forward(micro_batches, count)
    return model.of_all_replicas(totals).tolist()
