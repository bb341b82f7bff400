"""A process group with its size and this rank's place in it; and the priority of the threads that serve groups."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """A named set of ranks. A group of size 1 has no handle, and every collective returns early on it.

    Attributes:
        name: "tensor", "data", "pipeline", ...: the key of the communication statistics.
        ranks: the global ranks, in group order.
        rank: this process's place in `ranks`.
        handle: the torch process group; None when the size is 1.
        in_rank_order: whether sums over it are formed in the order of its ranks, rather than as the backend likes.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    handle: dist.ProcessGroup | None = None
    in_rank_order: bool = False

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a process group cannot be copied


def alone(name: str) -> Group:
    """The group of this process only."""
    return Group(name)


TASKS = Path("/proc/self/task")


def let_computing_go_first() -> None:
    """Gloo's threads no longer interrupt the computing of this process; they take what it leaves of its core.

    Posting a transfer can wake the transport's thread while the connection's lock is still held. Where it then takes
    the core over, it polls for that lock until its time slice ends: milliseconds for a message that needs microseconds
    (measured with both cores busy: 2.6 ms, and 0.07 ms with this). Under SCHED_BATCH a thread that wakes up waits until
    the core is free or the slice of the running thread is over. Linux only, and from torch 2.13 on, where
    these threads have a name; elsewhere nothing happens. To be called after groups were made, each of which has a
    thread of its own.
    """
    if not TASKS.is_dir():
        return
    for task in TASKS.iterdir():
        # A thread that has ended meanwhile, or that may not be changed here, is left as it is.
        with suppress(OSError):
            if (task / "comm").read_text().startswith("gloo"):
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
