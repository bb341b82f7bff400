"""A process group together with what everybody asks of it: its size and this rank's place in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """A named set of ranks. A group of size 1 has no handle, and every collective returns early on it.

    Attributes:
        name: "tensor", "data", "pipeline", ...: the key of the communication statistics.
        ranks: the global ranks, in group order.
        rank: this process's place in `ranks`.
        handle: the torch process group; None when the size is 1.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


def alone(name: str) -> Group:
    """The group of this process only."""
    return Group(name)
