"""Running statistics of the norms: one update a step, from all micro-batches of the global batch, in global order.

Every replica sees every micro-batch's statistics and merges them in the same order, so that the buffers are equal on
all of them, and equal to those of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.comm.group import Group
from megasnn.comm.statistics import statistics
from megasnn.layers.batch_norm import ParallelBatchNorm


def merge_running_statistics(norms: Sequence[ParallelBatchNorm], data: Group, most_micro_batches: int) -> None:
    """Merges what the norms recorded in this step, over all replicas, into their running statistics.

    The pooled mean and unbiased variance of all values of the step (Chan et al. 1983, equation 2.1, on biased
    variances), as a norm over the whole global batch would have seen. Sums are taken in float64.

    Args:
        norms: this rank's norms, the same on every replica; their `pending` records are consumed.
        data: the data-parallel group, in the order in which replicas take their micro-batches.
        most_micro_batches: the largest number of micro-batches that any replica has.
    """
    tracked = [norm for norm in norms if norm.running_mean is not None and (norm.pending or data.size > 1)]
    if not tracked:
        return
    table = _gathered(_local_table(tracked, most_micro_batches), data)
    column = 0
    for index, norm in enumerate(tracked):
        assert norm.running_mean is not None
        channels = norm.running_mean.numel()
        counts = table[:, index]
        start = len(tracked) + column
        means, variances = table[:, start : start + channels], table[:, start + channels : start + 2 * channels]
        _update(norm, counts.tolist(), means, variances)
        norm.pending.clear()
        column += 2 * channels


def _local_table(norms: Sequence[ParallelBatchNorm], rows: int) -> Tensor:
    """One row for each micro-batch: counts of all norms, then mean and variance of each; unused rows have count 0."""
    width = len(norms) + sum(2 * norm.running_mean.numel() for norm in norms if norm.running_mean is not None)
    device = next(norm.running_mean.device for norm in norms if norm.running_mean is not None)
    table = torch.zeros(rows, width, dtype=torch.float64, device=device)
    for row in range(max(len(norm.pending) for norm in norms)):
        values = [table.new_tensor([norm.pending[row][2] for norm in norms])]
        for norm in norms:
            mean, variance, _ = norm.pending[row]
            values += [mean.double(), variance.double()]
        table[row] = torch.cat(values)
    return table


def _gathered(table: Tensor, data: Group) -> Tensor:
    if data.size == 1:
        return table
    tables = [torch.empty_like(table) for _ in range(data.size)]
    statistics.record(data.name, "all_gather", "step", table.nbytes)
    dist.all_gather(tables, table, group=data.handle)
    return torch.cat(tables)


def _update(norm: ParallelBatchNorm, counts: list[float], means: Tensor, variances: Tensor) -> None:
    assert norm.running_mean is not None and norm.running_var is not None
    total = sum(counts)
    mean = torch.zeros_like(means[0])
    for count, value in zip(counts, means, strict=True):
        mean += value * (count / total)
    squares = torch.zeros_like(mean)
    for count, value, variance in zip(counts, means, variances, strict=True):
        squares += count * (variance + (value - mean) ** 2)
    norm.num_batches_tracked += 1
    weight = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
    unbiased = squares / max(total - 1, 1)
    norm.running_mean.mul_(1 - weight).add_(weight * mean.to(norm.running_mean.dtype))
    norm.running_var.mul_(1 - weight).add_(weight * unbiased.to(norm.running_var.dtype))
