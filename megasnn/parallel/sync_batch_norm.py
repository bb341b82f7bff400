"""Batch norm statistics over ranks: a shared micro-batch's, and a global batch's running ones.

Running statistics have a single rank's bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megasnn.common.memory import copy_without_waiting
from megasnn.parallel.collectives import all_gather_into
from megasnn.parallel.traffic import traffic
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
    traffic.record(group.name, "all-gather", (group.size - 1) * mine.nbytes)
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


class RunningStatistics:
    """Merges a step's batch-norm statistics into the running ones.

    Pools in float64 (Chan et al. 1983, equation 2.1).

    Args:
        norms: the same on every replica, after their dry run.
        data: replicas in micro-batch order.
        of_owners: reassigns tied norms' statistics.
    """

    def __init__(
        self,
        norms: Sequence[RunningNorm],
        data: Group,
        of_owners: Callable[[Sequence[StepStatistics]], Sequence[StepStatistics]] | None = None,
    ) -> None:
        self._data = data
        self._of_owners = of_owners
        self._norms = [norm for norm in norms if norm.running_mean is not None]
        self._calls = [norm.calls for norm in self._norms]
        # Every step has the same norms, whose tensors and sizes are looked up once.
        self._table: _Table | None = None
        self._called: list[RunningNorm] = []
        self._rounds: list[_Round] = []

    def merge(self, most_micro_batches: int) -> None:
        """Merges the global batch's statistics, and consumes the norms' `pending` records. Collective.

        Args:
            most_micro_batches: on any replica.
        Raises:
            ValueError: a norm was not called as in the dry run.
        """
        norms = []
        for norm, calls in zip(self._norms, self._calls, strict=True):
            if norm.pending or (self._data.size > 1 and calls):
                norms.append(norm)
        if not norms:
            return
        if self._table is None or self._table.norms != norms:
            self._table = _Table(norms)
        # Every replica forms the same sums in the same order, so that all keep the same bits.
        rows = self._table.rows(most_micro_batches)
        if self._data.size > 1:
            rows = _all_gathered(rows, self._data).flatten(0, 1)
        found: Sequence[StepStatistics] = self._table.pooled(rows)
        if self._of_owners is not None:
            found = self._of_owners(found)
        called = [norm for norm, _, _ in found]
        if self._called != called:
            self._called = called
            self._rounds = _rounds(called)
        for each in self._rounds:
            each.update(found)
        for norm in norms:
            norm.pending.clear()


class _Table:
    """A step's statistics: by micro-batch, a row with all calls' counts, means and variances."""

    def __init__(self, norms: Sequence[RunningNorm]) -> None:
        self.norms = norms
        self._calls = [norm.calls for norm in norms]
        self._called: list[RunningNorm] = []
        self._channels: list[int] = []
        for norm, calls in zip(norms, self._calls, strict=True):
            assert norm.running_mean is not None
            self._called += [norm] * calls
            self._channels += [norm.running_mean.numel()] * calls
        self._device = norms[0].num_batches_tracked.device
        self._repeats = copy_without_waiting(torch.tensor(self._channels), self._device)

    def rows(self, number: int) -> Tensor:
        """This replica's rows, float64 `[number, columns]`. Unused ones have count 0."""
        records_of_calls = []
        has_unexpected = False
        for norm, calls in zip(self.norms, self._calls, strict=True):
            has_unexpected = has_unexpected or (not calls and bool(norm.pending))
            for call in range(calls):
                records_of_calls.append(norm.pending[call::calls])
        micro_batches = {len(records) for records in records_of_calls}
        if has_unexpected or len(micro_batches) > 1 or max(micro_batches) > number:
            raise ValueError(
                f"batch norms recorded {[len(norm.pending) for norm in self.norms]} statistics, but in the dry run a "
                f"forward calls them {self._calls} times: call each norm equally often in every forward"
            )
        columns = len(self._channels) + 2 * sum(self._channels)
        table = torch.zeros(number, columns, dtype=torch.float64, device=self._device)
        records_of_rows = list(zip(*records_of_calls, strict=True))
        if not records_of_rows:
            return table
        counts: list[int | Tensor] = []
        means_and_variances: list[Tensor] = []
        for records in records_of_rows:
            counts += [count for _, _, count in records]
            means_and_variances += [mean for mean, _, _ in records]
            means_and_variances += [variance for _, variance, _ in records]
        filled = table[: len(records_of_rows)]
        filled[:, : len(records_of_calls)] = _on_device(counts, table).view(len(records_of_rows), -1)
        filled[:, len(records_of_calls) :] = torch.cat(means_and_variances).view(len(records_of_rows), -1)
        return table

    def pooled(self, rows: Tensor) -> list[StepStatistics]:
        """Mean and unbiased variance over all rows, by call."""
        calls = len(self._channels)
        width = sum(self._channels)
        counts, means, variances = rows.split_with_sizes([calls, width, width], dim=1)
        counts = counts.repeat_interleave(self._repeats, dim=1, output_size=width)
        total = counts.sum(0)
        mean = torch.zeros_like(total)
        squares = torch.zeros_like(total)
        # Row by row, in the order of the micro-batches: torch.sum promises no order.
        for row in (means * (counts / total)).unbind():
            mean += row
        for row in (counts * (variances + (means - mean) ** 2)).unbind():
            squares += row
        variance = squares / (total - 1).clamp_min(1)
        of_calls = mean.split_with_sizes(self._channels), variance.split_with_sizes(self._channels)
        return list(zip(self._called, *of_calls, strict=True))


def _on_device(counts: Sequence[int | Tensor], like: Tensor) -> Tensor:
    # Ranks that share a micro-batch know its count on the device only.
    for count in counts:
        if isinstance(count, Tensor):
            return torch.stack([each if isinstance(each, Tensor) else like.new_full((), each) for each in counts])
    return copy_without_waiting(torch.tensor(counts, dtype=torch.float64), like.device)


def _rounds(called: Sequence[RunningNorm]) -> list[_Round]:
    """By number of the call: a norm called twice is updated twice."""
    positions_of: dict[RunningNorm, list[int]] = {}
    for position, norm in enumerate(called):
        positions_of.setdefault(norm, []).append(position)
    rounds = []
    for number in range(max(map(len, positions_of.values()), default=0)):
        positions = [of_norm[number] for of_norm in positions_of.values() if number < len(of_norm)]
        rounds.append(_Round(positions, [called[position] for position in positions]))
    return rounds


class _Round:
    """One call of each norm: running = (1 - weight) running + weight new.

    The weight is the momentum, or 1 / batches.
    """

    def __init__(self, positions: Sequence[int], norms: Sequence[RunningNorm]) -> None:
        self._positions = positions
        self._batches = [norm.num_batches_tracked for norm in norms]
        self._running: list[Tensor] = []
        for kind in ("running_mean", "running_var"):
            self._running += [getattr(norm, kind) for norm in norms]
        self._sizes = [buffer.numel() for buffer in self._running]
        device = self._running[0].device
        self._repeats = copy_without_waiting(torch.tensor(self._sizes), device)
        momentum_of = [math.nan if norm.momentum is None else norm.momentum for norm in norms]
        self._momentums = copy_without_waiting(torch.tensor(momentum_of, dtype=torch.float64), device)
        self._averages = self._momentums.isnan()

    def update(self, found: Sequence[StepStatistics]) -> None:
        torch._foreach_add_(self._batches, 1)
        of_step = [found[position][1] for position in self._positions]
        of_step += [found[position][2] for position in self._positions]
        old = torch.cat(self._running)
        new = torch.cat(of_step).to(old.dtype)
        reciprocals = torch.stack(self._batches).double().reciprocal()
        of_norms = torch.where(self._averages, reciprocals, self._momentums).repeat(2)
        weights = of_norms.repeat_interleave(self._repeats, output_size=old.numel())
        updated = old * (1 - weights).to(old.dtype) + new * weights.to(old.dtype)
        torch._foreach_copy_(self._running, updated.split_with_sizes(self._sizes))
