"""Sums of squares of tensors, also of those whose rows belong to several replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from megasnn.comm.collectives import start_exchange
from megasnn.comm.group import Group
from megasnn.kernels.layout import flat_in_memory
from megasnn.sharding import Shard, ShardedTensor, row_bounds


class Squares:
    """The sum of squares of each of some tensors.

    Where replicas form sums in rank order, each row is summed up by itself, and then all of them in their order, from
    whichever replicas own them: no bit of the result depends on who owns which.

    Args:
        tensors: this rank's, the same on all replicas; rows of all of them have owners, or of none.
        data: the replicas.
        device: of the tensors, also where there are none.

    Attributes:
        are_parts: whether what this gives is of the rows that this rank owns only, to be summed over the replicas.
    """

    def __init__(self, tensors: Sequence[ShardedTensor], data: Group, device: torch.device) -> None:
        self._data, self._device, self._by_row = data, device, data.in_rank_order and data.size > 1
        self._shapes = [entry.tensor.shape for entry in tensors]
        have_owners = any(entry.shard.is_cut("data") for entry in tensors)
        self.are_parts = have_owners and not self._by_row
        rows = [_rows_of_all(entry.shard) for entry in tensors]
        self._rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self._owned: list[int] | None = None
        if have_owners and self._by_row:
            owned = [[end - begin for begin, end in pairwise(row_bounds(count, data.size))] for count in rows]
            self._owned = [sum(each) for each in zip(*owned, strict=True)]
            # Rows arrive in the order of their owners, and of tensors from each.
            ranks, numbers = range(data.size), range(len(owned))
            arriving = [(number, rank) for rank in ranks for number in numbers for _ in range(owned[number][rank])]
            order = sorted(range(len(arriving)), key=arriving.__getitem__)
            self._order = torch.tensor(order, dtype=torch.int64, device=device)

    def __call__(self, values: Sequence[Tensor | None]) -> Tensor:
        """The sums, float64 on the device, `[tensors]`. No value is waited for. Collective over the replicas where they
        are formed in rank order and rows have owners.

        Args:
            values: like the tensors, of what this rank owns; None is zero.
        """
        if not self._shapes:
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        if not self._by_row:
            nothing = torch.zeros((), dtype=torch.float64, device=self._device)
            norms = [nothing] * len(values)
            given = {slot: value for slot, value in enumerate(values) if value is not None and value.numel()}
            if given:
                found = torch._foreach_norm(list(given.values()), 2, dtype=torch.float64)
                for slot, norm in zip(given, found, strict=True):
                    norms[slot] = norm
            return torch.stack(norms) ** 2
        rows = torch.cat([self._of_rows(value, shape) for value, shape in zip(values, self._shapes, strict=True)])
        if self._owned is not None:
            rows = self._of_all_owners(rows, self._owned)
        return torch.segment_reduce(rows, "sum", lengths=self._rows, unsafe=True, initial=0.0)

    def _of_rows(self, value: Tensor | None, shape: torch.Size) -> Tensor:
        """The sum of squares of each row, in the order in which its elements lie in memory."""
        rows = shape[0] if shape else 1
        if value is None or not value.numel():
            return torch.zeros(rows, dtype=torch.float64, device=self._device)
        matrix = flat_in_memory(value.detach()).view(rows, -1)
        return torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64) ** 2

    def _of_all_owners(self, rows: Tensor, owned: list[int]) -> Tensor:
        rank, size = self._data.rank, self._data.size
        exchange = start_exchange(rows.repeat(size - 1), [len(rows)] * size, owned, self._data, "step")
        parts = exchange.wait()
        parts[rank] = rows
        return torch.cat(parts).index_select(0, self._order)


def _rows_of_all(shard: Shard) -> int:
    """Those that replicas own together."""
    whole = replace(shard, cuts=tuple((axis, cut) for axis, cut in shard.cuts if axis != "data"))
    return whole.local_shape[0] if whole.local_shape else 1
