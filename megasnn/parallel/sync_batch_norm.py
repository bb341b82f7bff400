"""Statistics of norms over ranks: those of a micro-batch that ranks share, and the running ones of a global batch.

What travels are statistics, not values. All ranks form the same sums in the same order, so that they go on from the
same bits. Every replica sees every micro-batch's statistics, so that the buffers are equal on all of them, and equal to
those of one rank. A norm that a forward of the model calls several times has one update for each call, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megasnn.common.memory import without_waiting
from megasnn.parallel.collectives import all_gather_into, traffic
from megasnn.parallel_state import Group


@dataclass(frozen=True)
class SharedStatistics:
    """The exchange over a group of several ranks; see `megasnn.kernels.norm_neuron.Shared`."""

    group: Group

    def statistics(self, own: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Pools mean and biased variance (Chan et al. 1983, equation 2.1, on biased variances). A rank may have no
        values: then its own are not looked at.

        Args:
            own: `[2, C]` in double precision, over `count` values a channel.

        Returns:
            `[2, C]` over the values of all ranks, and their number, a scalar on the device.
        """
        mine = torch.cat([own.flatten(), own.new_full((1,), count)])
        parts = _all_gathered(mine, self.group)
        counts, (means, variances) = parts[:, -1:], parts[:, :-1].unflatten(1, own.shape).unbind(1)
        total = counts.sum(0)
        shares = counts / total
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean).square())).sum(0)
        return torch.stack((mean, variance)), total.squeeze(0)

    def total(self, sums: Tensor) -> Tensor:
        """Sums a tensor in backward over the ranks, in rank order."""
        return _all_gathered(sums, self.group).sum(0)


def _all_gathered(mine: Tensor, group: Group) -> Tensor:
    """`[ranks, ...]`."""
    traffic.record(group.name, (group.size - 1) * mine.nbytes)
    into = mine.new_empty(group.size, *mine.shape)
    all_gather_into(into, mine.reshape(-1), group)
    return into


class RunningNorm(Protocol):
    """A norm that records the statistics of its inputs.

    Attributes:
        calls: how often a forward of the model calls it.
        pending: mean and biased variance `[C_local]`, and number of values a channel, of each call.
    """

    momentum: float | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor
    pending: list[tuple[Tensor, Tensor, int | Tensor]]

    @property
    def calls(self) -> int: ...


StepStatistics = tuple[RunningNorm, Tensor, Tensor]
"""A norm, and mean and unbiased variance `[C_local]` of all its input of a step, in one of its calls in a forward."""


def merge_running_statistics(
    norms: Sequence[RunningNorm],
    data: Group,
    most_micro_batches: int,
    of_owners: Callable[[Sequence[StepStatistics]], Sequence[StepStatistics]] | None = None,
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
    expected = [norm for norm in norms if norm.pending or data.size > 1 and norm.calls]
    tracked = [norm for norm in expected if norm.running_mean is not None]
    if not tracked:
        return
    table = _local_table(tracked, most_micro_batches)
    if data.size > 1:
        table = _all_gathered(table, data).flatten(0, 1)
    called = [norm for norm in tracked for _ in range(norm.calls)]
    channels = [norm.running_mean.numel() for norm in called if norm.running_mean is not None]
    counts, means, variances = table.split([len(channels), sum(channels), sum(channels)], dim=1)
    repeats = without_waiting(torch.tensor(channels), table.device)
    counts = counts.repeat_interleave(repeats, dim=1, output_size=sum(channels))
    pooled = [values.split(channels) for values in _pooled(counts, means, variances)]
    found = list(zip(called, *pooled, strict=True))
    _update(found if of_owners is None else of_owners(found))
    for norm in tracked:
        norm.pending.clear()


def _local_table(norms: Sequence[RunningNorm], rows: int) -> Tensor:
    """One row for each micro-batch: counts, means and variances of all calls of all norms; unused rows have count 0."""
    calls = [norm.pending[call :: norm.calls] for norm in norms for call in range(norm.calls)]
    unexpected = any(norm.pending for norm in norms if not norm.calls)
    if unexpected or len({len(records) for records in calls}) > 1 or len(calls[0]) > rows:
        raise ValueError(
            f"batch norms recorded {[len(norm.pending) for norm in norms]} statistics, and by the dry run a forward "
            f"calls them {[norm.calls for norm in norms]} times: let every forward call each of them as often"
        )
    buffers = [norm.running_mean for norm in norms if norm.running_mean is not None]
    width = sum(norm.calls * (1 + 2 * buffer.numel()) for norm, buffer in zip(norms, buffers, strict=True))
    table = torch.zeros(rows, width, dtype=torch.float64, device=buffers[0].device)
    if rows_of_records := list(zip(*calls, strict=True)):
        filled = table[: len(rows_of_records)]
        counts = [count for records in rows_of_records for _, _, count in records]
        if any(isinstance(count, Tensor) for count in counts):  # the device knows it, where ranks share a micro-batch
            known = torch.stack([each if isinstance(each, Tensor) else table.new_full((), each) for each in counts])
        else:
            known = without_waiting(torch.tensor(counts, dtype=torch.float64), table.device)
        filled[:, : len(calls)] = known.view(len(filled), -1)
        values = [record[kind] for records in rows_of_records for kind in (0, 1) for record in records]
        filled[:, len(calls) :] = torch.cat(values).view(len(filled), -1)
    return table


def _pooled(counts: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance per column, added up row by row in the order of the micro-batches, which no operator
    for a sum promises."""
    total = counts.sum(0)
    mean, squares = torch.zeros_like(total), torch.zeros_like(total)
    for row in means * (counts / total):
        mean += row
    for row in counts * (variances + (means - mean) ** 2):
        squares += row
    return mean, squares / (total - 1).clamp_min(1)


def _update(found: Sequence[StepStatistics]) -> None:
    """Gives running statistics those of a step, call by call: running = (1 - weight) running + weight new, where the
    weight is the momentum, or 1 / batches."""
    columns: dict[RunningNorm, list[tuple[Tensor, Tensor]]] = {}
    for norm, mean, variance in found:
        columns.setdefault(norm, []).append((mean, variance))
    for number in range(max(map(len, columns.values()), default=0)):
        here = {norm: calls[number] for norm, calls in columns.items() if number < len(calls)}
        counts = [norm.num_batches_tracked for norm in here]
        torch._foreach_add_(counts, 1)
        running: list[Tensor] = [getattr(norm, kind) for kind in ("running_mean", "running_var") for norm in here]
        sizes, old = [buffer.numel() for buffer in running], torch.cat(running)
        new = torch.cat([value for kind in zip(*here.values(), strict=True) for value in kind]).to(old.dtype)
        momentum_of = [math.nan if norm.momentum is None else norm.momentum for norm in here]
        momentums = without_waiting(torch.tensor(momentum_of, dtype=torch.float64), old.device)
        of_norms = torch.where(momentums.isnan(), torch.stack(counts).double().reciprocal(), momentums).repeat(2)
        repeats = without_waiting(torch.tensor(sizes), old.device)
        weights = of_norms.repeat_interleave(repeats, output_size=sum(sizes))
        updated = old * (1 - weights).to(old.dtype) + new * weights.to(old.dtype)
        torch._foreach_copy_(running, updated.split(sizes))
