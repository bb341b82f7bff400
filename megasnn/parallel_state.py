"""Global parallel state: this rank's coordinates in the grid, and its process groups.

Only `megasnn.engine` and higher levels read it; lower levels receive groups as arguments.
"""

from __future__ import annotations

import datetime
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megasnn.common.grid import AXES, REPLICA_AXES, SUMMED_AXES, Axis, Coordinates, Grid

TASKS = Path("/proc/self/task")

# Field of ParallelState -> name in the communication statistics, and axes. All ranks create the groups in this order.
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
# Groups with the same ranks share a process group, except these, whose traffic needs its own queue: gradients travel in
# another order than gathered weights, and an early receive would block a send to the same rank.
_SEPARATE = ("dp_shard_grad", "pp_down")
# Pipeline groups run no collectives on the device. `start_messages` starts them pair by pair.
_STARTED_BY_MESSAGES = ("pp", "pp_down")


@dataclass(eq=False)
class Group:
    """An ordered set of ranks; by default this process alone.

    Attributes:
        name: key in the communication statistics.
        rank: index in `ranks`.
        process_group: None for a single rank, and if freed or never created.
        sizes: by axis, slowest first.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    process_group: dist.ProcessGroup | None = None
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.size = len(self.ranks)
        self.sizes = self.sizes or (self.size,)

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """None when the size is 1. Raises RuntimeError if freed or never created."""
        # torch takes None for the whole world.
        if self.process_group is None and self.size > 1:
            raise RuntimeError(
                f"the group {self.name} of {self.size} ranks has no process group: it was freed by "
                "destroy_model_parallel, or never created; call initialize_model_parallel"
            )
        return self.process_group

    @cached_property
    def is_gloo(self) -> bool:
        """Whether Gloo carries tensors in the host's memory."""
        return "gloo" in dist.get_backend(self.handle)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        # A process group cannot be copied.
        return self


# NCCL creates a communicator at its first use: the host waits there for the peers, and device memory is allocated.
# Afterwards its calls are kernels in one queue, each of which blocks the queue until all peers have launched theirs.
# To rule out deadlock, all ranks start their communicators before the first step, in one global order: collectives
# first, then ordered pairs of pipeline ranks, ascending, upward before downward. Each direction of a pair needs a queue
# of its own: an early receive would otherwise block the send that its peer is waiting for. tests/nccl_like.py waits in
# the same places.


def start_messages(group: Group, source: int, target: int, device: torch.device) -> None:
    """Starts the communicator from group rank `source` to `target`. Both ranks call it."""
    if group.rank == source:
        dist.send(torch.zeros(1, device=device), group.ranks[target], group=group.handle)
    elif group.rank == target:
        dist.recv(torch.zeros(1, device=device), group.ranks[source], group=group.handle)


@dataclass(frozen=True)
class ParallelState:
    """This rank's coordinates and process groups.

    Attributes:
        cp: ranks sharing a micro-batch.
        dp: all data parallel replicas, with different micro-batches.
        dp_replicate: replicas with a full weight copy each.
        dp_shard: replicas sharing one weight copy.
        dp_shard_grad: the same ranks, for gradients.
        dp_replicate_cp: ranks with identical weight shards.
        dp_cp: ranks that sum gradients.
        pp_down: pp's ranks, for messages to lower ranks; `pp` carries messages to higher ranks.
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
        """One rank's state, with groups that cannot communicate; by default on a grid of one rank."""
        grid = grid or Grid()
        groups = {field: _group_of(grid, axes, rank, name) for field, (name, axes) in _GROUPS.items()}
        return cls(grid=grid, coordinates=grid.coordinates(rank), device=torch.device("cpu"), **groups)

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def holding_groups(self) -> dict[Axis, Group]:
        """By axis, groups with the same layers, whole or sharded."""
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
    """Forms the grid of all ranks; see `form_grid`. Collective.

    The data parallel size is the number of ranks divided by the product of the sizes.

    Args:
        timeout: for one wait in a group; None for torch's 30 minutes.
    """
    return form_grid(Grid(tp=tp, pp=pp, dp_shard=dp_shard, cp=cp), device or torch.device("cpu"), timeout)


def form_grid(of_replica: Grid, device: torch.device, timeout: datetime.timedelta | None = None) -> ParallelState:
    """Creates the grid of all ranks and its groups. Collective.

    Args:
        of_replica: one replica's ranks; the other ranks form further replicas.

    Raises:
        ValueError: the sizes do not divide the world size, or the world's process group does not fit.
        RuntimeError: a grid exists already.
    """
    global _state
    if _state is not None:
        raise RuntimeError(
            f"a grid exists already ({_state.grid}); close the Engine on it, or call destroy_model_parallel"
        )
    world_size, rank = 1, 0
    if dist.is_initialized():
        world_size, rank = dist.get_world_size(), dist.get_rank()
    grid = of_replica.over_ranks(world_size)
    _require_backend(device, world_size)
    groups = _create_groups(grid, rank, timeout)
    _state = ParallelState(grid=grid, coordinates=grid.coordinates(rank), device=device, **groups)
    # Creating a group waits for nobody; its first collective waits for all members. The world is last in the table: a
    # rank that returned early and destroyed a group would break the start of the others.
    for field, group in groups.items():
        if field not in _STARTED_BY_MESSAGES and group.size > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=group.handle)
    let_computing_go_first()
    return _state


def _require_backend(device: torch.device, world_size: int) -> None:
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        raise ValueError(
            "init_process_group was called with device_id, which puts all messages of a group into one queue and "
            "deadlocks the stages of a pipeline: call it without device_id"
        )
    if device.type == "cuda" and world_size > 1 and "nccl" not in dist.get_backend():
        raise ValueError(
            f"init_process_group was called with backend {dist.get_backend()}: ranks on GPUs need "
            'backend="cpu:gloo,cuda:nccl"'
        )


def _create_groups(grid: Grid, rank: int, timeout: datetime.timedelta | None) -> dict[str, Group]:
    created: dict[str, dist.ProcessGroup | None] = {str(grid.groups(*AXES)): dist.group.WORLD}
    groups: dict[str, Group] = {}
    for field, (name, axes) in _GROUPS.items():
        partition = grid.groups(*axes)
        group = _group_of(grid, axes, rank, name)
        groups[field] = group
        if group.size == 1:
            continue
        key = field if field in _SEPARATE else str(partition)
        if key not in created:
            # torch wants every rank to create every group, also the groups that it is no member of.
            process_groups = [dist.new_group(members, timeout, group_desc=name) for members in partition]
            created[key] = process_groups[partition.index([*group.ranks])]
        group.process_group = created[key]
    return groups


def _group_of(grid: Grid, axes: tuple[Axis, ...], rank: int, name: str) -> Group:
    ranks = next(each for each in grid.groups(*axes) if rank in each)
    sizes = tuple(grid.size(axis) for axis in AXES if axis in axes)
    return Group(name, tuple(ranks), ranks.index(rank), sizes=sizes)


def let_computing_go_first() -> None:
    """Lowers the priority of Gloo's threads. Linux only, and torch 2.13 or later, which names them."""
    # Posting a transfer can wake Gloo's thread while the poster still holds the connection's lock. If that thread
    # preempts the poster, it spins on the lock until its time slice ends: 2.6 ms a message with both cores busy, 0.07
    # at the lower priority.
    for task in TASKS.glob("*"):
        # The thread may have ended, or this process may not change its priority.
        with suppress(OSError):
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
    """Frees the groups and ends their threads; the world's process group stays."""
    global _state
    if _state is None:
        return
    groups: list[Group] = [getattr(_state, field) for field in _GROUPS]
    for process_group in dict.fromkeys(group.handle for group in groups):
        if process_group is not None and process_group is not dist.group.WORLD:
            dist.destroy_process_group(process_group)
    for group in groups:
        # A reference that outlives the grid would keep Gloo's threads alive, and a thread that releases tensors during
        # Python's shutdown aborts the program.
        group.process_group = None
    _state = None


def abandon_model_parallel() -> None:
    """Forgets the grid after an error, without freeing its groups."""
    global _state
    if _state is not None:
        # Freeing the groups would wait for unfinished transfers.
        _abandoned.append(_state)
    _state = None
