"""The global grid of ranks: one frozen object, with Megatron-LM's accessor names.

`initialize_model_parallel` lays the ranks out (tensor fastest, then data, then pipeline), makes the process groups on a
DeviceMesh and keeps them in one `ParallelState`. Constructors and megasnn.training read it; everything below is
passed the groups it needs. `destroy_model_parallel` frees the groups, after which another grid can be initialised.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from megasnn.comm.group import Group, let_computing_go_first
from megasnn.grid import Axis, Coordinates, Grid


@dataclass(frozen=True)
class ParallelState:
    """
    Attributes:
        grid, coordinates: the sizes of the axes and this rank's place.
        tensor, data, pipeline: the groups along one axis.
        backward: the pipeline group once more, for gradients: activations and gradients between two ranks then have
            queues of their own, so that the order on each is first in, first out.
        pipeline_down, backward_up: both once more, for placements in which activations also go to lower ranks, and
            gradients to higher ones.
        model: all ranks that together hold one copy of the model (tensor x pipeline).
        world: all ranks.
        mesh: the DeviceMesh ("pp", "dp", "tp"); None for a process without torch.distributed.
        device: where this rank computes.
    """

    grid: Grid
    coordinates: Coordinates
    tensor: Group
    data: Group
    pipeline: Group
    backward: Group
    pipeline_down: Group
    backward_up: Group
    model: Group
    world: Group
    mesh: DeviceMesh | None
    device: torch.device

    @property
    def rank(self) -> int:
        return self.world.rank

    def group(self, axis: Axis) -> Group:
        """The group along one axis."""
        group: Group = getattr(self, axis)
        return group

    @property
    def is_first_stage(self) -> bool:
        return self.coordinates.pipeline == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coordinates.pipeline == self.grid.pipeline - 1


_state: ParallelState | None = None


def start_process_group(backend: str = "auto", device: str = "auto", timeout_minutes: float = 10.0) -> torch.device:
    """Joins the ranks that torchrun started, once; a process started alone stays alone.

    NCCL where every rank of this machine has a GPU of its own, otherwise Gloo on the CPU.

    Returns:
        the device of this rank.
    Raises:
        ValueError: CUDA or NCCL asked for where there is none for this rank.
        ConnectionError: the other ranks did not come in time.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    kind = ("cuda" if gpus >= local_ranks else "cpu") if device == "auto" else device
    if kind == "cuda" and gpus < local_ranks:
        raise ValueError(f"--device cuda with {local_ranks} ranks on this machine, which has {gpus} GPU(s)")
    if backend == "nccl" and kind != "cuda":
        raise ValueError(f"--backend nccl needs a GPU for each rank; {local_ranks} rank(s), {gpus} GPU(s): use gloo")
    chosen = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(chosen)
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        name = ("nccl" if kind == "cuda" else "gloo") if backend == "auto" else backend
        try:
            _join_world(name, datetime.timedelta(minutes=timeout_minutes))
        except dist.DistError as error:
            raise ConnectionError(
                f"the {os.environ['WORLD_SIZE']} ranks did not come together within --distributed-timeout-minutes "
                f"{timeout_minutes:g}: did one of them end before, with an error of its own? ({error})"
            ) from error
    return chosen


def _join_world(backend: str, timeout: datetime.timedelta) -> None:
    """init_process_group, also when torchrun has started the ranks anew.

    Its store then still holds the addresses that the ranks before left there, under the keys that the new ones use:
    a rank that reads before they are replaced would look for one that is gone. So every start has keys of its own.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    # A change of nodes starts all ranks anew without counting as a restart: so the arrivals are counted.
    name = f"megasnn/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{world_size}"
    start = (store.add(f"{name}/arrivals", 1) - 1) // world_size
    own = dist.PrefixStore(f"{name}/{start}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timeout)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    device: torch.device | None = None,
) -> ParallelState:
    """Makes the groups of a data x tensor x pipeline grid over the whole world; data parallel is what is left over.

    Raises:
        ValueError: the sizes do not multiply to the world size (every factor is printed).
        RuntimeError: a grid exists already.
    """
    global _state
    if _state is not None:
        raise RuntimeError(
            f"a grid exists already ({_state.grid}); close the Engines on it, or call destroy_model_parallel"
        )
    device = torch.device("cpu") if device is None else device
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    grid = Grid.fit(world_size, tensor=tensor_model_parallel_size, pipeline=pipeline_model_parallel_size)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = None
    if dist.is_initialized():
        shape = (grid.pipeline, grid.data, grid.tensor)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    _state = ParallelState(
        grid=grid,
        coordinates=grid.coordinates(rank),
        tensor=_axis_group("tensor", "tp", grid, rank, mesh),
        data=_axis_group("data", "dp", grid, rank, mesh),
        pipeline=_axis_group("pipeline", "pp", grid, rank, mesh),
        backward=_new_group("backward", grid, rank, "pipeline"),
        pipeline_down=_new_group("pipeline", grid, rank, "pipeline"),
        backward_up=_new_group("backward", grid, rank, "pipeline"),
        model=_new_group("model", grid, rank, "pipeline", "tensor"),
        world=Group("world", tuple(range(world_size)), rank, dist.group.WORLD if world_size > 1 else None),
        mesh=mesh,
        device=device,
    )
    if world_size > 1:
        # Making a group does not wait for its members. A rank that went on and destroyed it would break their start.
        dist.all_reduce(torch.zeros(1, device=device))
    let_computing_go_first()
    return _state


def _members(grid: Grid, rank: int, *axes: Axis) -> tuple[int, ...]:
    return tuple(next(ranks for ranks in grid.groups(*axes) if rank in ranks))


def _axis_group(axis: Axis, mesh_dim: str, grid: Grid, rank: int, mesh: DeviceMesh | None) -> Group:
    ranks = _members(grid, rank, axis)
    if len(ranks) == 1 or mesh is None:
        return Group(axis, ranks)
    return Group(axis, ranks, ranks.index(rank), mesh.get_group(mesh_dim))


def _new_group(name: str, grid: Grid, rank: int, *axes: Axis) -> Group:
    mine = _members(grid, rank, *axes)
    if len(mine) == 1:
        return Group(name, mine)
    # Every rank of the world takes part in making every group.
    handles = {tuple(ranks): dist.new_group(ranks) for ranks in grid.groups(*axes)}
    return Group(name, mine, mine.index(rank), handles[mine])


def model_parallel_is_initialized() -> bool:
    return _state is not None


def get_parallel_state() -> ParallelState:
    """Raises RuntimeError before `initialize_model_parallel`."""
    if _state is None:
        raise RuntimeError("model parallelism is not initialised; call initialize_model_parallel first")
    return _state


def destroy_model_parallel() -> None:
    """Frees the groups of the grid; the world's process group stays. Does nothing when there is no grid."""
    global _state
    if _state is None:
        return
    mesh = _state.mesh
    # The mesh has groups of one rank too, along axes of size 1, which nobody else holds.
    handles = [] if mesh is None else [mesh.get_group(name) for name in mesh.mesh_dim_names or ()]
    freed: list[dist.ProcessGroup] = []
    others = _state.backward, _state.pipeline_down, _state.backward_up, _state.model
    for handle in (*handles, *(group.handle for group in others)):
        if handle is not None and handle is not dist.group.WORLD and not any(handle is other for other in freed):
            dist.destroy_process_group(handle)
            freed.append(handle)
    _state = None


def get_tensor_model_parallel_group() -> Group:
    return get_parallel_state().tensor


def get_tensor_model_parallel_world_size() -> int:
    return get_parallel_state().tensor.size


def get_tensor_model_parallel_rank() -> int:
    return get_parallel_state().tensor.rank


def get_pipeline_model_parallel_group() -> Group:
    return get_parallel_state().pipeline


def get_pipeline_model_parallel_world_size() -> int:
    return get_parallel_state().pipeline.size


def get_pipeline_model_parallel_rank() -> int:
    return get_parallel_state().pipeline.rank


def get_data_parallel_group() -> Group:
    return get_parallel_state().data


def get_data_parallel_world_size() -> int:
    return get_parallel_state().data.size


def get_data_parallel_rank() -> int:
    return get_parallel_state().data.rank


def get_model_parallel_group() -> Group:
    return get_parallel_state().model


def is_pipeline_first_stage() -> bool:
    return get_parallel_state().is_first_stage


def is_pipeline_last_stage() -> bool:
    return get_parallel_state().is_last_stage
