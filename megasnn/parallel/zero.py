"""Parameter shards by rows, each owned by one rank of a group (ZeRO-1, arXiv 1910.02054).

The owner sums the gradients, keeps the optimizer state, and sends the new values. FSDP scatters gradients here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from megasnn.kernels.layout import flat_in_memory
from megasnn.parallel.bucket_sizes import exchange_bytes
from megasnn.parallel.collectives import start_exchange, sum_in_rank_order
from megasnn.parallel.sharding import own_span
from megasnn.parallel_state import Group

# Bytes, as in torch's CPU allocator. A matrix product may sum in another order at another alignment.
ALIGNMENT = 64


class ParameterShards:
    """Shards of parameters with one type.

    Args:
        gradients: with the parameters' memory layout.
        local_shards: this rank's shards if it keeps nothing else (FSDP).

    Attributes:
        shards: this rank's rows of each parameter, as views: an optimizer step writes into the parameter.
        sum: the shards' gradients, summed over ranks since `sum` was zeroed.
        sums: views of `sum` by shard.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        holders: Group,
        local_shards: Sequence[nn.Parameter] | None = None,
    ) -> None:
        self._holders = holders
        self._gradients = by_owner(gradients, holders)
        self._counts = elements_by_rank(self._gradients)
        destinations: list[list[Tensor]] = []
        self._own_values: list[Tensor] = []
        if local_shards is None:
            destinations = by_owner(parameters, holders)
            self._own_values = destinations[holders.rank]
            # The values of this rank are in their place: its shards are views.
            destinations[holders.rank] = []
            self.shards = [nn.Parameter(own_param_shard(each, holders)) for each in parameters]
        else:
            self.shards = list(local_shards)
        self._gather = ShardGather(self._counts, destinations, holders)
        self.sum = gradients[0].new_zeros(self._counts[holders.rank])
        self.sums = side_by_side(self.shards, self.sum, [shard.numel() for shard in self.shards])

    def attach(self) -> None:
        """Makes the shards' gradients views of `sum` again."""
        for shard, total in zip(self.shards, self.sums, strict=True):
            shard.grad = total

    def start_sum(self) -> Callable[[], None]:
        """Starts a reduce-scatter, as an exchange of copies. The returned function waits, and adds to `sum`."""
        rank = self._holders.rank
        own = joined(self._gradients[rank], self.sum)
        to_others: list[Tensor] = []
        for other, parts in enumerate(self._gradients):
            if other != rank:
                to_others += parts
        from_ranks = [self._counts[rank]] * self._holders.size
        exchange = start_exchange(joined(to_others, self.sum), self._counts, from_ranks, self._holders)

        def finish() -> None:
            parts = exchange()
            parts[rank] = own
            self.sum.add_(sum_in_rank_order(parts))

        return finish

    def start_all_gather(self) -> Callable[[], None]:
        """Starts sending this rank's values. The returned function waits for the others'."""
        return self._gather.start(joined(self._own_values, self.sum))

    @property
    def exchange_bytes(self) -> int:
        """Peak, for one exchange."""
        bucket = self.sum.itemsize * sum(self._counts)
        return exchange_bytes(bucket, self.sum.nbytes, self._holders.size)


class ShardGather:
    """Sends this rank's shards to a group's other ranks, and copies theirs into views.

    Args:
        counts: elements sent, by rank.
        views: flat destinations, by rank; none for shards that are in place.
    """

    def __init__(self, counts: Sequence[int], views: Sequence[list[Tensor]], group: Group) -> None:
        self._group = group
        self._to_ranks = [counts[group.rank]] * group.size
        self._from_ranks = list(counts)
        self._views: list[Tensor] = []
        self._sizes: list[list[int]] = []
        for of_rank in views:
            self._views += of_rank
            self._sizes.append([view.numel() for view in of_rank])

    def start(self, mine: Tensor) -> Callable[[], None]:
        """Starts sending this rank's shards, `[n]`. The returned function waits, and fills the views."""
        outgoing = mine if self._group.size == 2 else mine.repeat(self._group.size - 1)
        exchange = start_exchange(outgoing, self._to_ranks, self._from_ranks, self._group)

        def finish() -> None:
            parts = exchange()
            parts[self._group.rank] = mine
            arrived: list[Tensor] = []
            for part, sizes in zip(parts, self._sizes, strict=True):
                if sizes:
                    arrived += part.split_with_sizes(sizes)
            if arrived:
                torch._foreach_copy_(self._views, arrived)

        return finish


def by_owner(tensors: Sequence[Tensor], holders: Group) -> list[list[Tensor]]:
    """By rank, flat views of its non-empty shards.

    Raises ValueError if a tensor's rows are not contiguous in memory.
    """
    parts: list[list[Tensor]] = [[] for _ in range(holders.size)]
    for tensor in tensors:
        flat = flat_in_memory(tensor.detach())
        rows = tensor.shape[0] if tensor.ndim else 1
        length = flat.numel() // max(rows, 1)
        if rows > 1 and tensor.stride(0) != length:
            raise ValueError(
                f"a parameter of shape {list(tensor.shape)} with strides {list(tensor.stride())} cannot be sharded, "
                "because its rows are not contiguous in memory: remove --use-distributed-optimizer and "
                "--weight-parallel-size"
            )
        for rank, part in enumerate(parts):
            own = own_span(rows, holders.sizes, rank)
            if own and length:
                part.append(flat[own.start * length : own.stop * length])
    return parts


def elements_by_rank(parts: Sequence[Sequence[Tensor]]) -> list[int]:
    """Number of elements in each rank's tensors."""
    counts = []
    for of_rank in parts:
        counts.append(sum(each.numel() for each in of_rank))
    return counts


def own_param_shard(parameter: Tensor, holders: Group) -> Tensor:
    """This rank's rows, as a view. A scalar is one row."""
    values = parameter.detach()
    if values.ndim == 0:
        values = values.view(1)
    own = own_span(len(values), holders.sizes, holders.rank)
    return values[own.start : own.stop]


def joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Flat copy, `[n]`. `like` decides type and device if there are no parts."""
    return torch.cat(list(parts)) if parts else like.new_empty(0)


def aligned(size: int) -> int:
    """Bytes, rounded up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def side_by_side(tensors: Sequence[Tensor], flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views of `flat` with each tensor's shape and strides. `sizes`: reserved elements."""
    starts = accumulate(sizes, initial=0)
    return [flat.as_strided(each.shape, each.stride(), start) for each, start in zip(tensors, starts, strict=False)]
