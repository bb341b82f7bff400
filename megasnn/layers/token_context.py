"""Context parallelism by tokens (`--context-parallel-cut tokens`).

Each rank has neighbouring tokens of all samples, and tokens are the last dimension everywhere: `[T, N, C, L]`. The dry
run sees whole sequences.
"""

from __future__ import annotations

from torch import Tensor

from megasnn.parallel.sharding import own_span
from megasnn.parallel_state import Group


def shared_tokens(length: int, ranks: int) -> tuple[range, ...]:
    """Each rank's tokens, divided as evenly as possible. Raises ValueError for fewer tokens than ranks."""
    if length < ranks:
        raise ValueError(
            f"there are {length} token(s) for {ranks} ranks: with --context-parallel-cut tokens, "
            f"--context-parallel-size may be {length} at most here"
        )
    return tuple(own_span(length, [ranks], rank) for rank in range(ranks))


def own_tokens(x: Tensor, group: Group) -> Tensor:
    """This rank's tokens of whole sequences `[..., L]`, a view."""
    own = shared_tokens(x.shape[-1], group.size)[group.rank]
    return x[..., own.start : own.stop]
