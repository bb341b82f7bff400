"""Running statistics of the norms: one update a step, from all micro-batches of the global batch, in global order.

A norm that a forward of the model calls several times has one for each call, in their order.

Every replica sees every micro-batch's statistics and merges them in the same order, so that the buffers are equal on
all of them, and equal to those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megasnn.comm.collectives import all_gather_into
from megasnn.comm.group import Group
from megasnn.comm.statistics import statistics
from megasnn.layers.batch_norm import ParallelBatchNorm
from megasnn.layers.holding import calls_of
from megasnn.pinned import without_waiting

StepStatistics = tuple[ParallelBatchNorm, Tensor, Tensor]
"""A norm, and mean and unbiased variance `[calls, C_local]` of all its input of a step: for each call in a forward."""


def merge_running_statistics(
    norms: Sequence[ParallelBatchNorm],
    data: Group,
    most_micro_batches: int,
    of_owners: Callable[[Sequence[StepStatistics]], Sequence[StepStatistics]] = lambda found: found,
) -> None:
    """Merges what the norms recorded in this step, over all replicas, into their running statistics.

    The pooled mean and unbiased variance of all values of the step (Chan et al. 1983, equation 2.1, on biased
    variances), as a norm over the whole global batch would have seen. Sums are taken in float64.

    Args:
        norms: this rank's norms, the same on every replica; their `pending` records are consumed.
        data: the data-parallel group, in the order in which replicas take their micro-batches.
        most_micro_batches: the largest number of micro-batches that any replica has.
        of_owners: whose running statistics are updated by what was found, for norms that several layers have.
    Raises:
        ValueError: a norm was called otherwise than in the dry run.
    """
    expected = [norm for norm in norms if norm.pending or data.size > 1 and calls_of(norm)]
    tracked = [norm for norm in expected if norm.running_mean is not None]
    if not tracked:
        return
    table = _gathered(_local_table(tracked, most_micro_batches), data)
    sizes = [(calls_of(norm), norm.running_mean.numel()) for norm in tracked if norm.running_mean is not None]
    channels = [size for calls, size in sizes for _ in range(calls)]
    counts, means, variances = table.split([len(channels), sum(channels), sum(channels)], dim=1)
    repeats = without_waiting(torch.tensor(channels), table.device)
    counts = counts.repeat_interleave(repeats, dim=1, output_size=sum(channels))
    pooled = [_of_each_call(values, sizes) for values in _pooled(counts, means, variances)]
    for norm, its_means, its_variances in of_owners(list(zip(tracked, *pooled, strict=True))):
        for mean, variance in zip(its_means, its_variances, strict=True):
            _update(norm, mean, variance)
    for norm in tracked:
        norm.pending.clear()


def _of_each_call(values: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The values of all norms, `[calls, C_local]` of each."""
    parts = values.split([calls * channels for calls, channels in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


def _local_table(norms: Sequence[ParallelBatchNorm], rows: int) -> Tensor:
    """One row for each micro-batch: counts, means and variances of all calls of all norms; unused rows have count 0.

    Raises ValueError for a norm that forwards have not called as often as the dry run.
    """
    calls = [norm.pending[call :: calls_of(norm)] for norm in norms for call in range(calls_of(norm))]
    unexpected = any(norm.pending for norm in norms if not calls_of(norm))
    if unexpected or len({len(records) for records in calls}) > 1 or len(calls[0]) > rows:
        raise ValueError(
            f"batch norms recorded {[len(norm.pending) for norm in norms]} statistics, and by the dry run a forward "
            f"calls them {[calls_of(norm) for norm in norms]} times: let every forward call each of them as often"
        )
    buffers = [norm.running_mean for norm in norms if norm.running_mean is not None]
    width = sum(calls_of(norm) * (1 + 2 * buffer.numel()) for norm, buffer in zip(norms, buffers, strict=True))
    table = torch.zeros(rows, width, dtype=torch.float64, device=buffers[0].device)
    rows_of_records = list(zip(*calls, strict=True))
    counts = _counts([[count for _, _, count in records] for records in rows_of_records], table)
    for row, records in enumerate(rows_of_records):
        values = [mean for mean, _, _ in records] + [variance for _, variance, _ in records]
        table[row] = torch.cat([counts[row], torch.cat(values).double()])
    return table


def _counts(counts: Sequence[Sequence[int | Tensor]], table: Tensor) -> Tensor:
    """How many values a channel each record is of, `[micro-batches, calls]`. Where ranks share a micro-batch, the
    device knows that, and elsewhere the host."""
    if any(isinstance(count, Tensor) for row in counts for count in row):
        on_device = [[c if isinstance(c, Tensor) else table.new_full((), c) for c in row] for row in counts]
        return torch.stack([torch.stack(row) for row in on_device])
    return without_waiting(torch.tensor(counts, dtype=torch.float64), table.device)


def _gathered(table: Tensor, data: Group) -> Tensor:
    if data.size == 1:
        return table
    statistics.record(data.name, "all_gather", "step", (data.size - 1) * table.nbytes)
    tables = table.new_empty(data.size * len(table), table.shape[1])
    all_gather_into(tables, table.view(-1), data)
    return tables


def _pooled(counts: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance per column, added up row by row: the order is that of the micro-batches."""
    total = counts.sum(0)
    mean, squares = torch.zeros_like(total), torch.zeros_like(total)
    for count, value in zip(counts, means, strict=True):
        mean += value * (count / total)
    for count, value, variance in zip(counts, means, variances, strict=True):
        squares += count * (variance + (value - mean) ** 2)
    return mean, squares / (total - 1).clamp_min(1)


def _update(norm: ParallelBatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert norm.running_mean is not None and norm.running_var is not None
    norm.num_batches_tracked += 1
    weight = norm.momentum if norm.momentum is not None else norm.num_batches_tracked.double().reciprocal()
    norm.running_mean.mul_(1 - weight).add_(weight * mean.to(norm.running_mean.dtype))
    norm.running_var.mul_(1 - weight).add_(weight * variance.to(norm.running_var.dtype))
