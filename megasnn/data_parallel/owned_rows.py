"""Rows of parameters that belong to one of the replicas each (ZeRO-1, arXiv 1910.02054).

The owner gets their gradients from all replicas, keeps their optimizer state, and gives all their new values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor, nn

from megasnn.comm.collectives import Exchange, start_exchange, sum_in_rank_order
from megasnn.comm.group import Group
from megasnn.data_parallel.checksum import in_memory_order
from megasnn.sharding import row_bounds


class OwnedRows:
    """The rows of some parameters of one type, by the replica that owns them.

    Args:
        gradients: of the parameters, as they lie in memory, like them.
        data: the replicas.

    Attributes:
        rows: for each parameter those of its rows that this rank owns, which share its memory; there may be none. A
            number is a row of one. Their gradients are what `start_sum` has summed last.
    """

    def __init__(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], data: Group) -> None:
        self._data = data
        self._values = _by_owner(parameters, data.size)
        self._gradients = _by_owner(gradients, data.size)
        self._counts = [sum(part.numel() for part in parts) for parts in self._values]
        self._of_others = list(chain(*_without(self._values, data.rank)))
        self._sum = parameters[0].new_zeros(self._counts[data.rank], requires_grad=False)
        self.rows = [_rows_of(parameter, data) for parameter in parameters]
        ends = accumulate((rows.numel() for rows in self.rows), initial=0)
        # Like the rows, as the optimizer wants it.
        self._sums = [
            self._sum.as_strided(rows.shape, rows.stride(), end) for rows, end in zip(self.rows, ends, strict=False)
        ]

    def attach(self) -> None:
        for rows, total in zip(self.rows, self._sums, strict=True):
            rows.grad = total

    def start_sum(self, direction: str) -> tuple[Exchange, Callable[[], None]]:
        """Starts sending gradients to their owners; the returned function waits for those of this rank's rows, and sums
        them up in rank order."""
        rank = self._data.rank
        outgoing = _joined(list(chain(*_without(self._gradients, rank))), self._sum)
        mine = [0 if other == rank else self._counts[rank] for other in range(self._data.size)]
        exchange = start_exchange(outgoing, self._counts, mine, self._data, direction)

        def finish() -> None:
            parts = exchange.wait()
            parts[rank] = _joined(self._gradients[rank], self._sum)
            self._sum.copy_(sum_in_rank_order(parts))

        return exchange, finish

    def start_sharing(self) -> Callable[[], None]:
        """Starts sending the values of this rank's rows to all others; the returned function waits for theirs."""
        rank, others = self._data.rank, self._data.size - 1
        outgoing = _joined(self._values[rank], self._sum).repeat(others)
        exchange = start_exchange(outgoing, [self._counts[rank]] * (others + 1), self._counts, self._data, "step")

        def finish() -> None:
            arrived = torch.cat(exchange.wait()).split([part.numel() for part in self._of_others])
            if self._of_others:
                torch._foreach_copy_(self._of_others, arrived)

        return finish


def _by_owner(tensors: Sequence[Tensor], ranks: int) -> list[list[Tensor]]:
    """The rows of each rank: one view of the memory of each tensor of which it owns some.

    Raises:
        ValueError: rows do not follow each other in memory.
    """
    parts: list[list[Tensor]] = [[] for _ in range(ranks)]
    for tensor in tensors:
        flat, rows = in_memory_order(tensor), tensor.shape[0] if tensor.ndim else 1
        length = flat.numel() // max(rows, 1)
        if rows > 1 and tensor.stride(0) != length:
            raise ValueError(
                f"a parameter of shape {list(tensor.shape)} and strides {list(tensor.stride())}: its rows do not "
                "follow each other in memory; leave --use-distributed-optimizer out"
            )
        for part, (first, last) in zip(parts, pairwise(row_bounds(rows, ranks)), strict=True):
            if first < last and length:
                part.append(flat[first * length : last * length])
    return parts


def _rows_of(parameter: Tensor, data: Group) -> nn.Parameter:
    values = parameter.detach()
    values = values if values.ndim else values.view(1)
    bounds = row_bounds(len(values), data.size)
    return nn.Parameter(values[bounds[data.rank] : bounds[data.rank + 1]])


def _without(parts: Sequence[list[Tensor]], rank: int) -> list[list[Tensor]]:
    return [part for other, part in enumerate(parts) if other != rank]


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else like.new_empty(0)
