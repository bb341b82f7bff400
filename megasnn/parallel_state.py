"""The global parallel state: process groups along the axes of the grid, how ranks start and end.

`start_process_group` joins the ranks that torchrun started. `initialize_model_parallel` lays them out on a
`megasnn.grid.Grid`, makes the process groups and starts their communicators. Constructors and megasnn.training read the
state; everything below is passed the groups it needs. `destroy_model_parallel` frees the groups.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megasnn.grid import AXES, REPLICA_AXES, SUMMED_AXES, Axis, Coordinates, Grid

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By device. What hosts tell each other never waits for a GPU."""
TASKS = Path("/proc/self/task")


# --- groups


class Handle:
    """Holder of a process group, which has threads of its own; empty once it is freed.

    Whoever still has a Group keeps no threads alive: a thread of Gloo's that gives tensors back while Python ends would
    end the program with an error.
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
        held: holder of the torch process group; None when the size is 1.
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


class Communicators:
    """Starts the communicators of this rank ahead of the first step, in one order on all ranks.

    NCCL makes a communicator at its first use: the host waits there for the other ranks, and takes device memory. Then
    its calls are kernels in one queue, each of which waits on the device until the other ranks have come to theirs.
    So that no rank waits for ever, collectives of a set of ranks have one communicator and each ordered pair of
    pipeline ranks has one: with both directions in one queue, a receive that is posted ahead would hold up the send
    that the peer needs to come to its own. Collectives start first, in the order of `_AXES_OF`, then messages by pairs
    in ascending order, upward before downward. The transport of tests/nccl_like.py waits in the same places.

    Args:
        wire: where a tensor lies that is sent to one other rank: the CPU where the transport takes none from a GPU.

    Attributes:
        device_bytes: device memory that communicators have taken; 0 on a CPU.
    """

    def __init__(self, wire: torch.device) -> None:
        self.wire = wire
        self._started: dict[tuple[object, ...], str] = {}
        self.device_bytes = 0

    @property
    def names(self) -> list[str]:
        """Purpose of each communicator, in the order of their start."""
        return list(self._started.values())

    def start(self, group: Group) -> None:
        """Starts a group's collectives. Collective, in the same order on all ranks."""
        if self._is_new(group, (), group.name):
            with self._counting_memory():
                dist.all_reduce(torch.zeros(1, device=self.wire), group=group.handle)

    def start_messages(self, group: Group, source: int, target: int) -> None:
        """Starts messages from one place in a group to another. Both ranks call it, in the same order as others."""
        ranks = group.ranks[source], group.ranks[target]
        if group.rank in (source, target) and self._is_new(group, ranks, f"{group.name} {source} to {target}"):
            message = torch.zeros(1, device=self.wire)
            with self._counting_memory():
                if group.rank == source:
                    dist.send(message, ranks[1], group=group.handle)
                else:
                    dist.recv(message, ranks[0], group=group.handle)

    def describe(self) -> str:
        """Summary for the log."""
        memory = f", {self.device_bytes / 1e6:.0f} MB of the GPU's memory" if self.wire.type == "cuda" else ""
        count = f"{len(self._started)} communicator{'s' * (len(self._started) != 1)}"
        return f"{count} on this rank{memory}: {', '.join(self.names)}"

    def _is_new(self, group: Group, between: tuple[int, ...], name: str) -> bool:
        """Notes a communicator. Groups of the same ranks may share a handle, and so their communicators."""
        if group.held is None or (group.held, between) in self._started:
            return False
        self._started[group.held, between] = name
        return True

    @contextmanager
    def _counting_memory(self) -> Iterator[None]:
        """Nothing waits for another rank yet: the device may be waited for."""
        before = self._free()
        yield
        self.device_bytes += before - self._free()

    def _free(self) -> int:
        if self.wire.type != "cuda":
            return 0
        torch.cuda.synchronize(self.wire)
        return torch.cuda.mem_get_info(self.wire)[0]


# --- the state

_AXES_OF: dict[str, tuple[Axis, ...]] = {
    "weight": ("weight",),
    "context": ("context",),
    "dp_replicate": ("data",),
    "dp_replicate_cp": ("data", "context"),
    "dp_cp": SUMMED_AXES,
    "tensor": ("tensor",),
    "data": REPLICA_AXES,
    "pipeline": ("pipeline",),
    "model": ("pipeline", "tensor"),
    "world": AXES,
}
"""The axes of each group, in the order in which all ranks make them and start their collectives."""
_FINER = ("weight", "context", "dp_replicate", "dp_replicate_cp", "dp_cp")
"""Groups that differ from the data group only where weights are kept by rows, or ranks share a micro-batch."""


@dataclass(frozen=True)
class ParallelState:
    """Grid, coordinates and process groups of this rank.

    Attributes:
        grid, coordinates: the sizes of the axes and this rank's index along each.
        tensor, context, pipeline (tp, cp, pp): groups along one axis; context ranks share a micro-batch.
        data (dp): all replicas, each of which has micro-batches of its own.
        weight (dp_shard): replicas that share one copy of the weights. scatter: the same once more for gradients, whose
            order is not that of the gathers.
        dp_replicate: ranks along the data axis alone, each with a copy of the weights.
        dp_replicate_cp: ranks that hold the same of the weights. dp_cp: ranks whose gradients are summed.
        downward: the pipeline group once more, for messages to lower ranks; those to higher ones go through `pipeline`.
        model: the ranks that together hold one copy of the model. world: all ranks.
        device: where this rank computes.
    """

    grid: Grid
    coordinates: Coordinates
    tensor: Group
    data: Group
    pipeline: Group
    downward: Group
    model: Group
    world: Group
    device: torch.device
    communicators: Communicators
    weight: Group
    scatter: Group
    context: Group
    dp_replicate: Group
    dp_replicate_cp: Group
    dp_cp: Group

    @property
    def rank(self) -> int:
        return self.world.rank

    def group(self, axis: Axis) -> Group:
        """The group along one axis."""
        group: Group = getattr(self, "dp_replicate" if axis == "data" else axis)
        return group

    def handles(self) -> list[Handle]:
        """Handles of all groups, each once, in the same order on all ranks."""
        groups = (getattr(self, name) for name in (*_AXES_OF, "scatter", "downward"))
        return [*dict.fromkeys(group.held for group in groups if group.held is not None)]

    @property
    def is_first_stage(self) -> bool:
        return self.coordinates.pipeline == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coordinates.pipeline == self.grid.pipeline - 1


_state: ParallelState | None = None
_abandoned: list[ParallelState] = []


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    device: torch.device | None = None,
    weight_parallel_size: int = 1,
    context_parallel_size: int = 1,
) -> ParallelState:
    """Makes the groups of the grid over the whole world; data parallel is what the sizes leave over.

    Args:
        weight_parallel_size: neighbouring replicas that share one copy of the weights (dp_shard).
        context_parallel_size: ranks that share a micro-batch.

    Raises:
        ValueError: the sizes do not multiply to the world size, or GPUs with a transport that does not serve them.
        RuntimeError: a grid exists already.
    """
    global _state
    if _state is not None:
        raise RuntimeError(
            f"a grid exists already ({_state.grid}); close the Engine on it, or call destroy_model_parallel"
        )
    device = torch.device("cpu") if device is None else device
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    grid = Grid.fit(
        world_size,
        tensor=tensor_model_parallel_size,
        pipeline=pipeline_model_parallel_size,
        weight=weight_parallel_size,
        context=context_parallel_size,
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    if world_size > 1 and device.type == "cuda":
        _require_gpu_transport(dist.get_backend(), dist.group.WORLD)
    takes_gpus = world_size == 1 or "nccl" in dist.get_backend()
    communicators = Communicators(device if takes_gpus else torch.device("cpu"))
    groups = _make_groups(grid, rank)
    _state = ParallelState(
        grid=grid, coordinates=grid.coordinates(rank), device=device, communicators=communicators, **groups
    )
    # Making a group does not wait for its members, starting it does. The world comes last: a rank that went on and
    # destroyed a group would break the start of the others. The pipeline's collectives are those of hosts.
    for name in _names(grid):
        if name != "pipeline":
            communicators.start(groups[name])
        if name == "weight":
            communicators.start(groups["scatter"])
    let_computing_go_first()
    return _state


def _names(grid: Grid) -> list[str]:
    """Names of the groups that are made for a grid."""
    has_finer = grid.weight > 1 or grid.context > 1
    return [name for name in _AXES_OF if has_finer or name not in _FINER]


def _make_groups(grid: Grid, rank: int) -> dict[str, Any]:
    """The groups of this rank by name. Every rank makes every group in the same order; equal ones are made once."""
    handles: dict[tuple[tuple[int, ...], ...], Handle] = {}
    if dist.group.WORLD is not None:
        handles[tuple(map(tuple, grid.groups(*AXES)))] = Handle(dist.group.WORLD)

    def make(name: str, axes: tuple[Axis, ...], apart: bool = False) -> Group:
        partition = tuple(map(tuple, grid.groups(*axes)))
        mine = next(ranks for ranks in partition if rank in ranks)
        if len(mine) == 1:
            return Group(name, mine)
        handle = None if apart else handles.get(partition)
        if handle is None:
            made = {ranks: dist.new_group(list(ranks), _timeout_of_world(), group_desc=name) for ranks in partition}
            handle = Handle(made[mine])
            if not apart:
                handles[partition] = handle
        return Group(name, mine, mine.index(rank), handle, tuple(grid.size(axis) for axis in AXES if axis in axes))

    found = {name: make(name, _AXES_OF[name]) for name in _names(grid)}
    found = {
        "weight": alone("weight"),
        "context": alone("context"),
        **dict.fromkeys(_FINER[2:], found["data"]),
        **found,
    }
    found["scatter"] = make("scatter", ("weight",), apart=True)
    found["downward"] = make("pipeline", ("pipeline",), apart=True)
    return found


def _timeout_of_world() -> datetime.timedelta | None:
    """Time that the world's ranks wait for each other; torch would give later groups 30 minutes."""
    world: Any = dist.group.WORLD
    try:
        timeout: datetime.timedelta = world._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):  # a transport of somebody else's
        return None
    return timeout


def _require_gpu_transport(backend: str, world: dist.ProcessGroup | None) -> None:
    if getattr(world, "bound_device_id", None) is not None:
        raise ValueError(
            "init_process_group was given device_id, with which all messages of a group share one queue: stages of a "
            "pipeline would wait for each other for ever; leave it out"
        )
    if backend == "nccl":
        raise ValueError(
            "init_process_group was given the backend nccl, which carries nothing that hosts tell each other: leave it "
            f"out, or give {BACKENDS['cuda']!r}"
        )


def let_computing_go_first() -> None:
    """Lowers the priority of Gloo's threads below the computing of this process.

    Posting a transfer can wake the transport's thread while the connection's lock is still held. Where it then takes
    the core over, it polls for that lock until its time slice ends (measured with both cores busy: 2.6 ms a message,
    and 0.07 ms with this). Linux only, and from torch 2.13 on, where these threads have a name.
    """
    if not TASKS.is_dir():
        return
    for task in TASKS.iterdir():
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
    for handle in _state.handles():
        if handle.made is not dist.group.WORLD:
            dist.destroy_process_group(handle.made)
        handle.free()
    _state = None


def abandon_model_parallel() -> None:
    """Forgets the grid after an error, without freeing its groups: what is under way on them may never end, and who
    frees a group waits for it."""
    global _state
    if _state is not None:
        _abandoned.append(_state)
    _state = None


# --- joining the ranks that torchrun started


def start_process_group(
    backend: str = "auto", device: str = "auto", timeout_minutes: float = 10.0, stages: int = 1
) -> torch.device:
    """Joins the ranks that torchrun started, once; a process started alone stays alone.

    NCCL where every rank of this machine has a GPU of its own, otherwise Gloo on the CPU. In a pipeline of several
    stages kernels are loaded with their libraries: one that is loaded at its first launch waits for all that the GPU
    does, a posted receive included.

    Returns:
        the device of this rank.
    Raises:
        ValueError: as `device_of_rank`.
        ConnectionError: the other ranks did not come in time.
    """
    if stages > 1:
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    chosen, timeout = device_of_rank(backend, device), datetime.timedelta(minutes=timeout_minutes)
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        problem = (
            f"the {os.environ['WORLD_SIZE']} ranks did not come together within --distributed-timeout-minutes "
            f"{timeout_minutes:g}: did one of them end before, with an error of its own, or does another program "
            f"listen at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}?"
        )
        try:
            store, rank, world_size = _meet(timeout, problem)
            _find_place(store, device)
            chosen = device_of_rank(backend, device)
            if chosen.type == "cuda":
                torch.cuda.set_device(chosen)
            name = "gloo" if backend == "gloo" else BACKENDS[chosen.type]
            dist.init_process_group(name, store=store, rank=rank, world_size=world_size, timeout=timeout)
        except dist.DistError as error:
            raise ConnectionError(f"{problem} ({error})") from error
    elif chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


def _meet(timeout: datetime.timedelta, problem: str) -> tuple[dist.Store, int, int]:
    """Returns the store of the ranks, this rank and their number, also when torchrun has started the ranks anew.

    torchrun's store then still holds the addresses that the ranks before left there, under the keys that the new ones
    use: a rank that reads before they are replaced would look for one that is gone. So every start has keys of its own.
    """
    # torch waits without an end for a program that takes the connection and never answers.
    limit = threading.Timer(timeout.total_seconds() + 5, _give_up, [problem])
    limit.daemon = True
    limit.start()
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    finally:
        limit.cancel()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store, rank, world_size
    # A change of nodes starts all ranks anew without counting as a restart: so the arrivals are counted.
    name = f"megasnn/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{world_size}"
    start = (store.add(f"{name}/arrivals", 1) - 1) // world_size
    return dist.PrefixStore(f"{name}/{start}", store), rank, world_size


def _give_up(problem: str) -> None:
    sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] ConnectionError: {problem}\n")
    sys.stderr.flush()
    os._exit(1)


_place: tuple[int, int] | None = None
"""Index and number of this rank among those of its machine that see the same GPUs; None before they have met."""


def _find_place(store: dist.Store, device: str) -> None:
    """Sets `_place`. Slurm and Kubernetes often show each rank one GPU, by the same number."""
    global _place
    local_rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    key = f"megasnn/gpus/{os.environ.get('GROUP_RANK', '')}/{socket.gethostname()}"
    store.set(f"{key}/{local_rank}", " ".join(visible_gpus() if device != "cpu" else ()))
    if ranks > 1:
        of_ranks = [store.get(f"{key}/{each}") for each in range(ranks)]
        alike = [each for each, seen in enumerate(of_ranks) if seen == of_ranks[local_rank]]
        _place = alike.index(local_rank), len(alike)


def visible_gpus() -> list[str]:
    """Returns names of the GPUs that this process sees, which are theirs alone."""
    return [str(torch.cuda.get_device_properties(each).uuid) for each in range(torch.cuda.device_count())]


def _place_among_alike() -> tuple[int, int]:
    """Returns `_place`; before ranks have met, as if all of this machine saw the same if there are enough GPUs, and
    otherwise as if this one saw its own."""
    if _place is not None:
        return _place
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (int(os.environ.get("LOCAL_RANK", "0")), ranks) if torch.cuda.device_count() >= ranks else (0, 1)


def device_of_rank(backend: str, device: str) -> torch.device:
    """The device of this rank; nothing is begun on it. With Gloo and GPUs, several ranks may share one.

    Raises:
        ValueError: CUDA or NCCL asked for where there is none for this rank.
    """
    gpus, (place, sharing) = torch.cuda.device_count(), _place_among_alike()
    kind = kind_of_device(device)
    if kind == "cuda" and torch.version.hip is not None:
        raise ValueError(f"--device cuda: {_rocm()}; use --device cpu, or a build of torch for CUDA")
    if kind == "cuda" and not gpus:
        raise ValueError(f"--device cuda, and torch finds no GPU: {why_no_gpu()}; or use --device cpu")
    if kind == "cuda" and gpus < sharing and backend != "gloo":
        raise ValueError(
            f"--device cuda with {sharing} ranks on this machine that see the same {gpus} GPU(s); ranks share a GPU "
            "with --backend gloo only"
        )
    if backend == "nccl" and kind != "cuda":
        raise ValueError(f"--backend nccl needs a GPU for each rank; {sharing} rank(s), {gpus} GPU(s): use gloo")
    return torch.device(kind, place % gpus) if kind == "cuda" else torch.device("cpu")


def kind_of_device(asked: str) -> str:
    """Device that `--device` comes to for the ranks of this machine, cpu or cuda."""
    enough = torch.cuda.device_count() >= _place_among_alike()[1] and torch.version.hip is None
    return ("cuda" if enough else "cpu") if asked == "auto" else asked


def _rocm() -> str:
    return f"torch {torch.__version__} is built for ROCm {torch.version.hip}, on which MegaSNN has never run"


def why_not_on_gpus(asked: str) -> str | None:
    """Why `--device auto` comes to the CPU where somebody may expect GPUs; None where nobody does."""
    if asked != "auto" or kind_of_device(asked) == "cuda":
        return None
    if torch.version.hip is not None:
        return _rocm()
    if gpus := torch.cuda.device_count():
        ranks = _place_among_alike()[1]
        return f"{ranks} ranks of this machine see the same {gpus} GPU(s); they share with --backend gloo --device cuda"
    return None if torch.version.cuda is None else why_no_gpu()


def why_no_gpu() -> str:
    """Why torch has no GPU, as far as it knows, and what to look at."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; https://pytorch.org/get-started has builds with it"
    return (
        f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and finds none; see whether nvidia-smi "
        "lists one, its driver is recent enough for that CUDA, and CUDA_VISIBLE_DEVICES does not hide it"
    )
