"""Rows of parameters that belong to one of the replicas each (ZeRO-1, arXiv 1910.02054).

The owner gets their gradients from all replicas, keeps their optimizer state, and gives all their new values. Ranks
that share a micro-batch hold the same weights, and own rows as replicas do. Shards of rows also carry FSDP's scatter,
of gradients to those who keep the rows; then nothing is gathered here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor, nn

from megasnn.kernels.layout import flat_in_memory
from megasnn.parallel.bucket_sizes import exchange_bytes
from megasnn.parallel.collectives import start_exchange, sum_in_rank_order
from megasnn.parallel.sharding import own_span
from megasnn.parallel_state import Group

ALIGNMENT = 64  # bytes, as of torch's own tensors on the CPU: a product may sum in another order at another alignment


class ParameterShards:
    """The rows of some parameters of one type, by the replica that owns them.

    Args:
        gradients: of the parameters, as they lie in memory, like them.
        holders: the ranks that hold the same of the weights.
        local_shards: this rank's rows, where it keeps no others: then there is nothing to be gathered.

    Attributes:
        shards: for each parameter those of its rows that this rank owns, which share its memory; there may be none. A
            number is a row of one. Their gradients are `sums`.
        sum: what `start_sum` has summed up since it was last zeroed; sums: the same for each parameter.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        holders: Group,
        local_shards: Sequence[nn.Parameter] | None = None,
    ) -> None:
        self._holders, self._gradients = holders, by_owner(gradients, holders)
        self._values = by_owner(parameters if local_shards is None else [], holders)
        self._counts = [sum(part.numel() for part in parts) for parts in self._gradients]
        self.sum = gradients[0].new_zeros(self._counts[holders.rank])
        self.shards = (
            [nn.Parameter(own_param_shard(each, holders)) for each in parameters]
            if local_shards is None
            else [*local_shards]
        )
        self.sums = side_by_side(self.shards, self.sum, [shards.numel() for shards in self.shards])

    def zero(self) -> None:
        self.sum.zero_()
        for shards, total in zip(self.shards, self.sums, strict=True):
            shards.grad = total

    def start_sum(self) -> Callable[[], None]:
        """Starts sending gradients to their owners, from copies of them. The returned function waits for those of this
        rank's rows, and adds their sum in rank order to `sum`."""
        rank, own = self._holders.rank, joined(self._gradients[self._holders.rank], self.sum)
        outgoing = joined([*chain(*(part for other, part in enumerate(self._gradients) if other != rank))], self.sum)
        mine = [self._counts[rank]] * self._holders.size
        exchange = start_exchange(outgoing, self._counts, mine, self._holders)

        def finish() -> None:
            parts = exchange()
            parts[rank] = own
            self.sum.add_(sum_in_rank_order(parts))

        return finish

    def start_all_gather(self) -> Callable[[], None]:
        """Starts sending the values of this rank's rows to all others; the returned function waits for theirs."""
        mine = joined(self._values[self._holders.rank], self.sum)
        return send_shards(mine, self._counts, self._values, self._holders)

    @property
    def exchange_bytes(self) -> int:
        """Peak bytes of an exchange."""
        bucket = self.sum.itemsize * sum(self._counts)
        return exchange_bytes(bucket, self.sum.nbytes, self._holders.size)


def send_shards(mine: Tensor, counts: Sequence[int], views: Sequence[list[Tensor]], group: Group) -> Callable[[], None]:
    """Starts sending this rank's rows to all others; the returned function waits for theirs, and copies them to their
    places.

    Args:
        mine: this rank's rows. counts: numbers of values that each rank sends.
        views: by rank.
    """
    outgoing = mine if group.size == 2 else mine.repeat(group.size - 1)  # a copy for each of the others
    exchange = start_exchange(outgoing, [counts[group.rank]] * group.size, counts, group)

    def finish() -> None:
        for rank, arrived in enumerate(exchange()):
            if rank != group.rank and views[rank]:
                torch._foreach_copy_(views[rank], list(arrived.split([each.numel() for each in views[rank]])))

    return finish


def by_owner(tensors: Sequence[Tensor], holders: Group) -> list[list[Tensor]]:
    """The rows of each rank: one view of the memory of each tensor of which it owns some.

    Raises:
        ValueError: rows do not follow each other in memory.
    """
    parts: list[list[Tensor]] = [[] for _ in range(holders.size)]
    for tensor in tensors:
        flat, rows = flat_in_memory(tensor.detach()), tensor.shape[0] if tensor.ndim else 1
        length = flat.numel() // max(rows, 1)
        if rows > 1 and tensor.stride(0) != length:
            raise ValueError(
                f"a parameter of shape {list(tensor.shape)} and strides {list(tensor.stride())}: its rows do not "
                "follow each other in memory; leave --use-distributed-optimizer and --weight-parallel-size out"
            )
        for rank, part in enumerate(parts):
            own = own_span(rows, holders.sizes, rank)
            if own and length:
                part.append(flat[own.start * length : own.stop * length])
    return parts


def own_param_shard(parameter: Tensor, holders: Group) -> Tensor:
    """This rank's rows, in the parameter's memory."""
    values = parameter.detach()
    values = values if values.ndim else values.view(1)
    own = own_span(len(values), holders.sizes, holders.rank)
    return values[own.start : own.stop]


def joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Copies parts side by side, `[n]`; of the type of `like` where there are none."""
    return torch.cat(list(parts)) if parts else like.new_empty(0)


def aligned(size: int) -> int:
    """Bytes that a tensor of this size takes beside others."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def side_by_side(tensors: Sequence[Tensor], flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Places in `flat`, in the memory order of the tensors, each of which takes a size."""
    starts = accumulate(sizes, initial=0)
    return [flat.as_strided(each.shape, each.stride(), start) for each, start in zip(tensors, starts, strict=False)]
