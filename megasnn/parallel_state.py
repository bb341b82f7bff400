"""The global grid of ranks: one frozen object, with Megatron-LM's accessor names.

`initialize_model_parallel` lays the ranks out (tensor fastest, then context, data, pipeline), makes the process groups,
starts their collectives and keeps them in one `ParallelState`. Constructors and megasnn.training read it; everything
below is passed the groups it needs. `destroy_model_parallel` frees the groups, after which another grid can be
initialised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megasnn.grid import AXES, REPLICA_AXES, SUMMED_AXES, Axis, Coordinates, Grid
from megasnn.parallel.communicators import Communicators
from megasnn.parallel.group import Group, Groups, Handle, alone, let_computing_go_first
from megasnn.parallel.world import BACKENDS

_GROUPS: dict[str, tuple[Axis, ...]] = {
    "tensor": ("tensor",),
    "data": REPLICA_AXES,
    "pipeline": ("pipeline",),
    "model": ("pipeline", "tensor"),
    "world": AXES,
}
"""The axes of each group, in the order in which all ranks make them and start their collectives."""
_FINER: dict[str, tuple[Axis, ...]] = {
    "weight": ("weight",),
    "context": ("context",),
    "other_data": ("data",),
    "copies": ("data", "context"),
    "summed": SUMMED_AXES,
}
"""Those that there are only where weights are kept by rows, or ranks share a micro-batch; they come before all others.
"""
_OTHERWISE_DATA = "copies", "summed", "other_data"
"""Of them those that are all replicas elsewhere."""


@dataclass(frozen=True)
class ParallelState:
    """
    Attributes:
        grid, coordinates: the sizes of the axes and this rank's place.
        tensor, pipeline: the groups along one axis. context: the ranks that share a micro-batch. data: all replicas,
            each of which has micro-batches of its own.
        weight: the replicas that share one copy of the weights. scatter: the same once more, for gradients: when these
            are complete is no part of the order in which weights are gathered.
        copies: the replicas, and ranks that share a micro-batch with them, that hold the same of the weights.
        summed: all of which gradients are the sum: replicas, and ranks that share a micro-batch with them.
        other_data: the ranks along the data axis alone.
        downward: the pipeline group once more, for messages to lower ranks; those to higher ones go through `pipeline`.
            No queue has messages in both directions (megasnn/parallel/communicators.py).
        model: all ranks that together hold one copy of the model (tensor x pipeline).
        world: all ranks.
        device: where this rank computes.
        communicators: those that are started.
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
    copies: Group
    context: Group
    summed: Group
    other_data: Group

    @property
    def rank(self) -> int:
        return self.world.rank

    def group(self, axis: Axis) -> Group:
        """The group along one axis."""
        group: Group = getattr(self, "other_data" if axis == "data" else axis)
        return group

    def handles(self) -> list[Handle]:
        """Those of all groups, each once, in the same order on all ranks."""
        groups = (getattr(self, name) for name in (*_FINER, *_GROUPS, "scatter", "downward"))
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
    """Makes the groups of a data x context x tensor x pipeline grid over the whole world; data parallel is what is left
    over.

    Args:
        weight_parallel_size: how many neighbouring replicas share one copy of the weights.
        context_parallel_size: how many ranks share a micro-batch.
    Raises:
        ValueError: the sizes do not multiply to the world size (every factor is printed), or GPUs with a transport that
            does not serve them.
        RuntimeError: a grid exists already.
    """
    global _state
    if _state is not None:
        raise RuntimeError(
            f"a grid exists already ({_state.grid}); close the Engine on it, or call destroy_model_parallel"
        )
    device = torch.device("cpu") if device is None else device
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    sizes = tensor_model_parallel_size, pipeline_model_parallel_size, weight_parallel_size, context_parallel_size
    grid = Grid.fit(world_size, *sizes)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if world_size > 1 and device.type == "cuda":
        _require_gpu_transport(dist.get_backend(), dist.group.WORLD)
    takes_gpus = world_size == 1 or "nccl" in dist.get_backend()
    wire = device if takes_gpus else torch.device("cpu")
    groups = Groups(grid, rank)
    table = _GROUPS if grid.weight == grid.context == 1 else {**_FINER, **_GROUPS}
    named: dict[str, Any] = {"weight": alone("weight"), "context": alone("context")}
    named |= {name: groups(name, axes) for name, axes in table.items()}
    named = {**dict.fromkeys(_OTHERWISE_DATA, named["data"]), **named}
    _state = ParallelState(
        grid=grid,
        coordinates=grid.coordinates(rank),
        **named,
        scatter=groups("scatter", ("weight",), apart=True),
        downward=groups("pipeline", ("pipeline",), apart=True),
        device=device,
        communicators=Communicators(wire),
    )
    # Making a group does not wait for its members, starting it does. The world comes last: a rank that went on and
    # destroyed a group would break the start of the others.
    for name in table:
        if name != "pipeline":  # whose collectives are those of hosts
            _state.communicators.start(getattr(_state, name))
        if name == "weight":
            _state.communicators.start(_state.scatter)
    let_computing_go_first()
    return _state


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


def get_context_parallel_group() -> Group:
    return get_parallel_state().context


def get_context_parallel_world_size() -> int:
    return get_parallel_state().context.size


def get_context_parallel_rank() -> int:
    return get_parallel_state().context.rank


def get_model_parallel_group() -> Group:
    return get_parallel_state().model


def is_pipeline_first_stage() -> bool:
    return get_parallel_state().is_first_stage


def is_pipeline_last_stage() -> bool:
    return get_parallel_state().is_last_stage
