"""Process groups, each with its size and this rank's place in it; how those of a grid are made; and the priority of the
threads that serve them."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megasnn.grid import AXES, Axis, Grid


class Handle:
    """A process group of torch's, which has threads of its own; nothing once it is freed.

    It stands between a Group and the process group, so that whoever still has a Group keeps no threads alive. A thread
    of Gloo's that gives tensors back while Python ends would end the program with an error.
    """

    def __init__(self, made: dist.ProcessGroup) -> None:
        self._made: dist.ProcessGroup | None = made

    @property
    def made(self) -> dist.ProcessGroup:
        """The process group. Raises RuntimeError when it is freed."""
        if self._made is None:
            raise RuntimeError("the grid of ranks is gone, and its process groups with it; make another one")
        return self._made

    def free(self) -> None:
        """Lets go of the process group. Waits for its threads, and these for what is under way."""
        self._made = None


@dataclass(frozen=True)
class Group:
    """A named set of ranks. A group of size 1 has no handle, and every collective returns early on it.

    Attributes:
        name: "tensor", "data", "pipeline", ...: the key of the communication statistics.
        ranks: the global ranks, in group order.
        rank: this process's place in `ranks`.
        held: the torch process group, in what lets go of it at the end; None when the size is 1.
        sizes: of the axes that the ranks lie along, the slowest first; their product is the size.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    held: Handle | None = None
    sizes: tuple[int, ...] = ()

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """The torch process group; None when the size is 1. Raises RuntimeError when it is freed."""
        return None if self.held is None else self.held.made

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a process group cannot be copied


def alone(name: str) -> Group:
    """The group of this process only."""
    return Group(name)


class Groups:
    """Makes the groups of a grid, on all ranks in the same order. Those of the same ranks are one."""

    def __init__(self, grid: Grid, rank: int) -> None:
        self._grid, self._rank = grid, rank
        self._handles: dict[tuple[tuple[int, ...], ...], Handle] = {}
        if dist.group.WORLD is not None:
            self._handles[_partition(grid, AXES)] = Handle(dist.group.WORLD)

    def __call__(self, name: str, axes: tuple[Axis, ...], apart: bool = False) -> Group:
        """The group of this rank along some axes.

        Args:
            apart: whether it is made even where there is one of the same ranks.
        """
        partition = _partition(self._grid, axes)
        mine = next(ranks for ranks in partition if self._rank in ranks)
        if len(mine) == 1:
            return Group(name, mine)
        if apart:
            handle = self._made(name, partition)
        elif partition not in self._handles:
            handle = self._handles[partition] = self._made(name, partition)
        else:
            handle = self._handles[partition]
        sizes = tuple(self._grid.size(axis) for axis in AXES if axis in axes)
        return Group(name, mine, mine.index(self._rank), handle, sizes=sizes)

    def _made(self, name: str, partition: tuple[tuple[int, ...], ...]) -> Handle:
        # Every rank of the world takes part in making every group.
        made = {ranks: dist.new_group(list(ranks), _timeout_of_world(), group_desc=name) for ranks in partition}
        return Handle(next(each for ranks, each in made.items() if self._rank in ranks))


def _timeout_of_world() -> timedelta | None:
    """How long its ranks wait for each other; groups that are made later have torch's default of 30 minutes instead."""
    world: Any = dist.group.WORLD
    try:
        timeout: timedelta = world._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):  # a transport of somebody else's
        return None
    return timeout


def _partition(grid: Grid, axes: tuple[Axis, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, grid.groups(*axes)))


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
