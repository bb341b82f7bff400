"""Batch norm statistics over ranks: a shared micro-batch's, and a global batch's running ones.

Running statistics have a single rank's bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megasnn.common.memory import without_waiting
from megasnn.parallel.collectives import all_gather_into, traffic
from megasnn.parallel_state import Group


@dataclass(frozen=True)
class SharedStatistics:
    """`megasnn.kernels.norm_neuron.Shared` over several ranks."""

    group: Group

    def statistics(self, own: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Pools mean and biased variance (Chan et al. 1983, equation 2.1). Count 0 has no effect.

        Args:
            own: `[2, C]` in float64, over `count` values a channel.

        Returns:
            `[2, C]` over all ranks, and the pooled count as a scalar on the device.
        """
        mine = torch.cat([own.flatten(), own.new_full((1,), count)])
        parts = _all_gathered(mine, self.group)
        counts = parts[:, -1:]
        means, variances = parts[:, :-1].unflatten(1, own.shape).unbind(1)
        total = counts.sum(0)
        shares = counts / total
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean).square())).sum(0)
        return torch.stack((mean, variance)), total.squeeze(0)

    def total(self, sums: Tensor) -> Tensor:
        """Sum in rank order, for backward."""
        return _all_gathered(sums, self.group).sum(0)


def _all_gathered(mine: Tensor, group: Group) -> Tensor:
    traffic.record(group.name, (group.size - 1) * mine.nbytes)
    into = mine.new_empty(group.size, *mine.shape)
    all_gather_into(into, mine.reshape(-1), group)
    return into


class RunningNorm(Protocol):
    """A norm with running statistics.

    Attributes:
        calls: in one model forward.
        pending: by call, mean and biased variance `[C_local]` and values a channel.
    """

    momentum: float | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor
    pending: list[tuple[Tensor, Tensor, int | Tensor]]

    @property
    def calls(self) -> int: ...


# A norm, and mean and unbiased variance `[C_local]` of a step's inputs to one of its calls.
StepStatistics = tuple[RunningNorm, Tensor, Tensor]


def merge_running_statistics(
    norms: Sequence[RunningNorm],
    data: Group,
    most_micro_batches: int,
    of_owners: Callable[[Sequence[StepStatistics]], Sequence[StepStatistics]] | None = None,
) -> None:
    """Merges the global batch's statistics into the norms' running ones. Collective over the replicas.

    Pools in float64 (Chan et al. 1983, equation 2.1).

    Args:
        norms: the same on every replica. Their `pending` records are consumed.
        data: replicas in micro-batch order.
        most_micro_batches: on any replica.
        of_owners: reassigns tied norms' statistics.

    Raises:
        ValueError: a norm was not called as in the dry run.
    """
    channels_of: dict[RunningNorm, int] = {}
    for norm in norms:
        is_expected = norm.pending or (data.size > 1 and norm.calls)
        if is_expected and norm.running_mean is not None:
            channels_of[norm] = norm.running_mean.numel()
    if not channels_of:
        return
    # Every replica forms the same sums in the same order, so that all keep the same bits.
    table = _local_table(channels_of, most_micro_batches)
    if data.size > 1:
        table = _all_gathered(table, data).flatten(0, 1)
    called: list[RunningNorm] = []
    channels: list[int] = []
    for norm, size in channels_of.items():
        called += [norm] * norm.calls
        channels += [size] * norm.calls
    counts, means, variances = table.split([len(channels), sum(channels), sum(channels)], dim=1)
    repeats = without_waiting(torch.tensor(channels), table.device)
    counts = counts.repeat_interleave(repeats, dim=1, output_size=sum(channels))
    mean, variance = _pooled(counts, means, variances)
    found = list(zip(called, mean.split(channels), variance.split(channels), strict=True))
    _update(found if of_owners is None else of_owners(found))
    for norm in channels_of:
        norm.pending.clear()


def _local_table(channels_of: Mapping[RunningNorm, int], rows: int) -> Tensor:
    """By micro-batch, a row with all calls' counts, means and variances. Unused rows have count 0."""
    norms = list(channels_of)
    records_of_calls = []
    width = 0
    for norm, channels in channels_of.items():
        for call in range(norm.calls):
            records_of_calls.append(norm.pending[call :: norm.calls])
            width += 1 + 2 * channels
    has_unexpected = any(norm.pending for norm in norms if not norm.calls)
    micro_batches = {len(records) for records in records_of_calls}
    if has_unexpected or len(micro_batches) > 1 or max(micro_batches) > rows:
        raise ValueError(
            f"batch norms recorded {[len(norm.pending) for norm in norms]} statistics, but in the dry run a forward "
            f"calls them {[norm.calls for norm in norms]} times: call each norm equally often in every forward"
        )
    table = torch.zeros(rows, width, dtype=torch.float64, device=norms[0].num_batches_tracked.device)
    records_of_rows = list(zip(*records_of_calls, strict=True))
    if not records_of_rows:
        return table
    counts: list[int | Tensor] = []
    values: list[Tensor] = []
    for records in records_of_rows:
        counts += [count for _, _, count in records]
        values += [mean for mean, _, _ in records]
        values += [variance for _, variance, _ in records]
    # Ranks that share a micro-batch know its count on the device only.
    if any(isinstance(count, Tensor) for count in counts):
        known = torch.stack([each if isinstance(each, Tensor) else table.new_full((), each) for each in counts])
    else:
        known = without_waiting(torch.tensor(counts, dtype=torch.float64), table.device)
    filled = table[: len(records_of_rows)]
    filled[:, : len(records_of_calls)] = known.view(len(filled), -1)
    filled[:, len(records_of_calls) :] = torch.cat(values).view(len(filled), -1)
    return table


def _pooled(counts: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance by column."""
    total = counts.sum(0)
    mean = torch.zeros_like(total)
    squares = torch.zeros_like(total)
    # Row by row, in the order of the micro-batches: torch.sum promises no order.
    for row in means * (counts / total):
        mean += row
    for row in counts * (variances + (means - mean) ** 2):
        squares += row
    return mean, squares / (total - 1).clamp_min(1)


def _update(found: Sequence[StepStatistics]) -> None:
    """running = (1 - weight) running + weight new, by call. The weight is the momentum, or 1 / batches."""
    calls_of: dict[RunningNorm, list[tuple[Tensor, Tensor]]] = {}
    for norm, mean, variance in found:
        calls_of.setdefault(norm, []).append((mean, variance))
    most_calls = max((len(calls) for calls in calls_of.values()), default=0)
    for number in range(most_calls):
        norms = [norm for norm, calls in calls_of.items() if number < len(calls)]
        counts = [norm.num_batches_tracked for norm in norms]
        torch._foreach_add_(counts, 1)
        running: list[Tensor] = []
        of_step: list[Tensor] = []
        for index, kind in enumerate(("running_mean", "running_var")):
            running += [getattr(norm, kind) for norm in norms]
            of_step += [calls_of[norm][number][index] for norm in norms]
        sizes = [buffer.numel() for buffer in running]
        old = torch.cat(running)
        new = torch.cat(of_step).to(old.dtype)
        momentum_of = [math.nan if norm.momentum is None else norm.momentum for norm in norms]
        momentums = without_waiting(torch.tensor(momentum_of, dtype=torch.float64), old.device)
        of_norms = torch.where(momentums.isnan(), torch.stack(counts).double().reciprocal(), momentums).repeat(2)
        repeats = without_waiting(torch.tensor(sizes), old.device)
        weights = of_norms.repeat_interleave(repeats, output_size=sum(sizes))
        updated = old * (1 - weights).to(old.dtype) + new * weights.to(old.dtype)
        torch._foreach_copy_(running, updated.split(sizes))
