"""Context parallelism by tokens (`--context-parallel-cut tokens`).

Each rank has neighbouring tokens of all samples, and tokens are the last dimension everywhere: `[T, N, C, L]`. The dry
run sees whole sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megasnn.parallel.collectives import Exchange, start_exchange
from megasnn.parallel.sharding import context_spans
from megasnn.parallel_state import Group


def divide_tokens(length: int, ranks: int) -> tuple[range, ...]:
    """Each rank's tokens, divided as evenly as possible. Raises ValueError for fewer tokens than ranks."""
    return context_spans(length, ranks, "token")


def own_tokens(x: Tensor, group: Group) -> Tensor:
    """This rank's tokens of whole sequences `[..., L]`, a view."""
    own = divide_tokens(x.shape[-1], group.size)[group.rank]
    return x[..., own.start : own.stop]


def check_own_tokens(tokens: int, own: range) -> None:
    """Raises ValueError for another number of tokens than a rank's own."""
    if tokens != len(own):
        raise ValueError(f"a rank with tokens {own.start} to {own.stop - 1} of each sequence got {tokens}")


def start_to_others(own: Tensor, sizes: Sequence[int], group: Group, to_later: bool) -> Exchange:
    """Starts sending a tensor to all later ranks, or to all earlier ones.

    Args:
        sizes: number of elements of each rank's tensor.
    Returns:
        A function that waits, and returns the received tensors, flat and in rank order: from the earlier ranks, or from
        the later ones.
    """
    earlier = range(group.rank)
    later = range(group.rank + 1, group.size)
    receivers, senders = (later, earlier) if to_later else (earlier, later)
    to_ranks = [sizes[group.rank] if rank in receivers else 0 for rank in range(group.size)]
    from_ranks = [sizes[rank] if rank in senders else 0 for rank in range(group.size)]
    exchange = start_exchange(own.reshape(-1).repeat(len(receivers)), to_ranks, from_ranks, group)

    def wait() -> list[Tensor]:
        parts = exchange()
        return [parts[rank] for rank in senders]

    return wait
