"""The global parallel state: this rank's place in the grid of ranks, and its process groups along the axes.

`initialize_model_parallel` lays the ranks out on a `megasnn.common.grid.Grid`, makes the process groups and starts
their collectives. `megasnn.engine` reads the state; what lies below it is passed the groups it needs.
`destroy_model_parallel` frees the groups.
"""

from __future__ import annotations

import datetime
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megasnn.common.grid import AXES, REPLICA_AXES, SUMMED_AXES, Axis, Coordinates, Grid

TASKS = Path("/proc/self/task")


@dataclass(eq=False)
class Group:
    """A named set of ranks; of this process alone by default. Collectives return early on a group of one rank, which
    has no process group.

    Attributes:
        name: "tp", "dp", "pp", ...: the key of the communication statistics.
        ranks: the global ranks, in group order.
        rank: this process's place in `ranks`.
        made: the process group of several ranks, until the grid is freed.
        sizes: of the axes that the ranks lie along, the slowest first; their product is the size.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    made: dist.ProcessGroup | None = None
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.size = len(self.ranks)
        self.sizes = self.sizes or (self.size,)

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """The torch process group; None when the size is 1. Raises RuntimeError where there is none, or it is freed."""
        if self.made is None and self.size > 1:  # None would be the world to torch
            raise RuntimeError(
                f"the group {self.name} has no process group: its grid of ranks was freed, or never made; call "
                "initialize_model_parallel"
            )
        return self.made

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a process group cannot be copied


# NCCL makes a communicator at its first use: the host waits there for the other ranks, and takes device memory. Then
# its calls are kernels in one queue, each of which waits on the device until the other ranks have come to theirs. So
# that no rank waits for ever, communicators start ahead of the first step, in one order on all ranks. Collectives of a
# set of ranks have one, and each ordered pair of pipeline ranks has one: with both directions in one queue, a receive
# that is posted ahead would hold up the send that the peer needs to come to its own. Collectives start first, then
# messages by pairs in ascending order, upward before downward. The transport of tests/nccl_like.py waits in the same
# places.


def start_messages(group: Group, source: int, target: int, device: torch.device) -> None:
    """Starts messages from one place in a group to another. Both ranks call it, in the same order as others."""
    if group.rank == source:
        dist.send(torch.zeros(1, device=device), group.ranks[target], group=group.handle)
    elif group.rank == target:
        dist.recv(torch.zeros(1, device=device), group.ranks[source], group=group.handle)


# --- the state

_GROUPS: dict[str, tuple[str, tuple[Axis, ...]]] = {
    "dp_shard_grad": ("dp_shard_grad", ("dp_shard",)),
    "dp_shard": ("dp_shard", ("dp_shard",)),
    "cp": ("cp", ("cp",)),
    "dp_replicate": ("dp", ("dp_replicate",)),
    "dp_replicate_cp": ("dp", ("dp_replicate", "cp")),
    "dp_cp": ("dp", SUMMED_AXES),
    "tp": ("tp", ("tp",)),
    "dp": ("dp", REPLICA_AXES),
    "pp": ("pp", ("pp",)),
    "pp_down": ("pp", ("pp",)),
    "world": ("world", AXES),
}
"""By field of the state the name in statistics and the axes, in the order in which all ranks make and start the groups.
"""
_APART = "dp_shard_grad", "pp_down"  # with a process group of their own beside that of the same ranks
_STARTED_LATER = "pp", "pp_down"  # by messages: the pipeline's collectives are those of hosts


@dataclass(frozen=True)
class ParallelState:
    """Place in the grid and process groups of this rank.

    Attributes:
        grid, coordinates: the sizes of the axes and this rank's index along each.
        tp, cp, pp, dp_replicate, dp_shard: groups along one axis. Context ranks share a micro-batch; replicas along
            dp_shard share one copy of the weights, those along dp_replicate have one each.
        dp: all replicas, each of which has micro-batches of its own.
        dp_replicate_cp: ranks that hold the same of the weights. dp_cp: ranks whose gradients are summed.
        dp_shard_grad: dp_shard once more for gradients, whose order is not that of the gathers.
        pp_down: the pipeline group once more, for messages to lower ranks; those to higher ones go through `pp`.
        world: all ranks.
        device: where this rank computes.
    """

    grid: Grid
    coordinates: Coordinates
    tp: Group
    cp: Group
    pp: Group
    dp: Group
    dp_replicate: Group
    dp_shard: Group
    dp_shard_grad: Group
    dp_replicate_cp: Group
    dp_cp: Group
    pp_down: Group
    world: Group
    device: torch.device

    @classmethod
    def without_process_groups(cls, grid: Grid | None = None, rank: int = 0) -> ParallelState:
        """State of one rank of a grid, by default of one rank, whose groups cannot communicate.

        It describes the rank's part of a model, or runs a model on one rank.
        """
        grid = grid or Grid()
        groups = {name: _group_of(grid, axes, rank, label) for name, (label, axes) in _GROUPS.items()}
        return cls(grid=grid, coordinates=grid.coordinates(rank), device=torch.device("cpu"), **groups)

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def holding_groups(self) -> dict[Axis, Group]:
        """Groups along each axis whose ranks hold the same layers, whole or cut."""
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp}


_state: ParallelState | None = None
_abandoned: list[ParallelState] = []


def initialize_model_parallel(
    *,
    tp: int = 1,
    pp: int = 1,
    dp_shard: int = 1,
    cp: int = 1,
    device: torch.device | None = None,
    timeout: datetime.timedelta | None = None,
) -> ParallelState:
    """Makes the groups of the grid over the whole world; data parallel is what the sizes leave over.

    Args:
        tp, pp: tensor and pipeline parallel size.
        dp_shard: neighbouring replicas that share one copy of the weights.
        cp: ranks that share a micro-batch.
        timeout: how long ranks wait for each other in the groups; torch's 30 minutes where it is None.

    Raises:
        ValueError: the sizes do not multiply to the world size, or the world is bound to a device.
        RuntimeError: a grid exists already.
    """
    global _state
    if _state is not None:
        raise RuntimeError(
            f"a grid exists already ({_state.grid}); close the Engine on it, or call destroy_model_parallel"
        )
    device = torch.device("cpu") if device is None else device
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    grid = Grid.fit(world_size, tp=tp, pp=pp, dp_shard=dp_shard, cp=cp)
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        raise ValueError(
            "init_process_group was given device_id, with which all messages of a group share one queue: stages of a "
            "pipeline would wait for each other for ever; leave it out"
        )
    if device.type == "cuda" and world_size > 1 and "nccl" not in dist.get_backend():
        raise ValueError(f"init_process_group was given {dist.get_backend()}: use cpu:gloo,cuda:nccl on GPUs")
    groups = _make_groups(grid, rank, timeout)
    _state = ParallelState(grid=grid, coordinates=grid.coordinates(rank), device=device, **groups)
    # Making a group does not wait for its members, starting it does. The world comes last: a rank that went on and
    # destroyed a group would break the start of the others.
    for name in _GROUPS:
        if name not in _STARTED_LATER and groups[name].size > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=groups[name].handle)
    let_computing_go_first()
    return _state


def _make_groups(grid: Grid, rank: int, timeout: datetime.timedelta | None) -> dict[str, Group]:
    """The groups of this rank by name. Every rank makes every group in the same order, and those of the same ranks
    once."""
    made_of: dict[str, dist.ProcessGroup | None] = {str(grid.groups(*AXES)): dist.group.WORLD}
    found: dict[str, Group] = {}
    for field, (name, axes) in _GROUPS.items():
        partition = grid.groups(*axes)
        group = _group_of(grid, axes, rank, name)
        if group.size > 1:
            key = field if field in _APART else str(partition)
            if key not in made_of:
                made = [dist.new_group(ranks, timeout, group_desc=name) for ranks in partition]
                made_of[key] = made[partition.index([*group.ranks])]
            group.made = made_of[key]
        found[field] = group
    return found


def _group_of(grid: Grid, axes: tuple[Axis, ...], rank: int, name: str) -> Group:
    """The group of a rank along some axes, without a process group."""
    ranks = next(each for each in grid.groups(*axes) if rank in each)
    sizes = tuple(grid.size(axis) for axis in AXES if axis in axes)
    return Group(name, tuple(ranks), ranks.index(rank), sizes=sizes)


def let_computing_go_first() -> None:
    """Lowers the priority of Gloo's threads below the computing of this process.

    Posting a transfer can wake the transport's thread while the connection's lock is still held. Where it then takes
    the core over, it polls for that lock until its time slice ends (measured with both cores busy: 2.6 ms a message,
    and 0.07 ms with this). Linux only, and from torch 2.13 on, where these threads have a name.
    """
    for task in TASKS.glob("*"):
        with suppress(OSError):  # a thread that has ended meanwhile, or that may not be changed here
            if (task / "comm").read_text().startswith("gloo"):
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def model_parallel_is_initialized() -> bool:
    return _state is not None


def get_parallel_state() -> ParallelState:
    """Raises RuntimeError before `initialize_model_parallel`."""
    if _state is None:
        raise RuntimeError("model parallelism is not initialised; call initialize_model_parallel first")
    return _state


def destroy_model_parallel() -> None:
    """Frees the groups of the grid, whose threads have ended then; the world's process group stays. Does nothing when
    there is no grid."""
    global _state
    if _state is None:
        return
    groups: list[Group] = [getattr(_state, name) for name in _GROUPS]
    for made in dict.fromkeys(group.handle for group in groups):
        if made is not None and made is not dist.group.WORLD:
            dist.destroy_process_group(made)
    for group in groups:
        # Whoever still has the Group keeps no thread of Gloo's alive: one that gives tensors back while Python ends
        # would end the program with an error.
        group.made = None
    _state = None


def abandon_model_parallel() -> None:
    """Forgets the grid after an error, without freeing its groups: what is under way on them may never end, and who
    frees a group waits for it."""
    global _state
    if _state is not None:
        _abandoned.append(_state)
    _state = None
