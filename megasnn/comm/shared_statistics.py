"""Statistics of a norm over values that ranks share out: each has some samples, or some rows, of a micro-batch.

What travels are the statistics, not the values. All ranks form the same sums in the same order, so that they go on from
the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megasnn.comm.collectives import all_gather_into
from megasnn.comm.group import Group
from megasnn.comm.statistics import statistics


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
        parts = self._gathered(mine, "forward")
        counts, (means, variances) = parts[:, -1:], parts[:, :-1].unflatten(1, own.shape).unbind(1)
        total = counts.sum(0)
        shares = counts / total
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean).square())).sum(0)
        return torch.stack((mean, variance)), total.squeeze(0)

    def total(self, sums: Tensor) -> Tensor:
        """The sum over the ranks of a tensor in backward, in rank order."""
        return self._gathered(sums, "backward").sum(0)

    def _gathered(self, mine: Tensor, direction: str) -> Tensor:
        """`[ranks, ...]`."""
        statistics.record(self.group.name, "all_gather", direction, (self.group.size - 1) * mine.nbytes)
        into = mine.new_empty(self.group.size, *mine.shape)
        all_gather_into(into, mine.reshape(-1), self.group)
        return into


def shared_over(group: Group) -> SharedStatistics | None:
    """The exchange over a group; None where it has only this rank."""
    return SharedStatistics(group) if group.size > 1 else None
