"""Sums of squares of tensors, also of those whose rows belong to several replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megasnn.comm.collectives import start_exchange
from megasnn.comm.group import Group
from megasnn.grid import SUMMED_AXES
from megasnn.kernels.layout import flat_in_memory
from megasnn.sharded_tensors import ShardedTensor


class Squares:
    """The sum of squares of each of some tensors.

    Where replicas form sums in rank order, each row is summed up by itself, and then all of them in their order, from
    whichever replicas own them: no bit of the result depends on who owns which.

    Args:
        tensors: this rank's, the same on all replicas; rows of all of them have owners, or of none.
        owners: the replicas that own rows, each of them others, and ranks that share a micro-batch with them; where
            rows have no owners, all of these.
        device: of the tensors, also where there are none.

    Attributes:
        parts: the axes over which what this gives is to be summed, where it is of the rows that this rank owns only.
    """

    def __init__(self, tensors: Sequence[ShardedTensor], owners: Group, device: torch.device) -> None:
        self._owners, self._device, self._by_row = owners, device, owners.in_rank_order and owners.size > 1
        self._shapes = [entry.tensor.shape for entry in tensors]
        axes = tuple(axis for axis in SUMMED_AXES if any(entry.shard.is_cut(axis) for entry in tensors))
        self.parts = () if self._by_row else axes
        rows = [len(entry.shard.without(axes).rows_of(entry.shard.place)) for entry in tensors]
        self._rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self._owned: list[int] | None = None
        if axes and self._by_row:
            owned = [[entry.shard.rows_of(place) for entry in tensors] for place in tensors[0].shard.place.along(axes)]
            self._owned = [sum(map(len, each)) for each in owned]
            # Rows arrive in the order of their owners, and of tensors from each.
            arriving = [(number, row) for each in owned for number, rows in enumerate(each) for row in rows]
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
        norms = [self._of_rows(value, shape) for value, shape in zip(values, self._shapes, strict=True)]
        rows = torch.cat(norms) ** 2
        if self._owned is not None:
            rows = self._of_all_owners(rows, self._owned)
        return torch.segment_reduce(rows, "sum", lengths=self._rows, unsafe=True, initial=0.0)

    def _of_rows(self, value: Tensor | None, shape: torch.Size) -> Tensor:
        """The norm of each row, in the order in which its elements lie in memory. No operator takes the rows of several
        tensors; as operands of `_foreach_norm` they would be added in an order that follows from where each begins."""
        rows = shape[0] if shape else 1
        if value is None or not value.numel():
            return torch.zeros(rows, dtype=torch.float64, device=self._device)
        matrix = flat_in_memory(value.detach()).view(rows, -1)
        return torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64)

    def _of_all_owners(self, rows: Tensor, owned: list[int]) -> Tensor:
        rank, size = self._owners.rank, self._owners.size
        exchange = start_exchange(rows.repeat(size - 1), [len(rows)] * size, owned, self._owners, "step")
        parts = exchange.wait()
        parts[rank] = rows
        return torch.cat(parts).index_select(0, self._order)
