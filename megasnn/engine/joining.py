"""The grid of ranks that an Engine works on, and the arithmetic of the process: one Engine at a time."""

from __future__ import annotations

import atexit
from collections.abc import Callable

import torch.distributed as dist

from megasnn.config import PretrainConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.engine.arithmetic import prepare_cublas, set_precision
from megasnn.engine.faults import placed, watch_ranks
from megasnn.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    get_parallel_state,
    initialize_model_parallel,
    model_parallel_is_initialized,
    start_process_group,
)

_open: tuple[ParallelState, Callable[[], None]] | None = None
"""The grid of the Engine that is open, and what leaves it."""


def join_ranks(config: PretrainConfig) -> tuple[ParallelState, Callable[[], None]]:
    """The grid of ranks of the Engine to come, with torch set up for its arithmetic.

    A grid that is made here is freed by the returned function, which also puts torch's settings back. So does the end
    of the program for an Engine that nobody has closed: threads of Gloo that are left then would end it with an error.

    Raises:
        ValueError: another Engine is open, the grid that is there has other sizes, or this device does not have the
            arithmetic.
    """
    global _open
    if _open is not None:
        other, leave_other = _open
        if is_current(other):
            raise ValueError("another Engine is open in this process: close it first (engine.close() or `with`)")
        leave_other()  # its grid is gone
    prepare_cublas(config.training)
    state, free_grid = get_or_create_grid(config.parallel)
    try:
        restore = set_precision(config.training, state.device)
    except ValueError:
        free_grid()
        raise

    def leave() -> None:
        global _open
        if _open is not None and _open[1] is leave:
            _open = None
            atexit.unregister(leave)
            restore()
            free_grid()

    _open = state, leave
    atexit.register(leave)
    return state, leave


def is_current(state: ParallelState) -> bool:
    return model_parallel_is_initialized() and get_parallel_state() is state


def get_or_create_grid(parallel: ParallelConfig) -> tuple[ParallelState, Callable[[], None]]:
    """The grid that is there, or one that is made of the ranks that torchrun has started; and what frees one that was
    made here.

    Raises:
        ValueError: the grid that is there has other sizes.
    """
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    weight, context = parallel.weight_parallel_size, parallel.context_parallel_size
    if model_parallel_is_initialized():
        state = get_parallel_state()
        grid = state.grid
        if (grid.tensor, grid.pipeline, grid.weight, grid.context) != (tensor, pipeline, weight, context):
            raise ValueError(
                f"the flags ask for --tensor-model-parallel-size {tensor}, --pipeline-model-parallel-size {pipeline}, "
                f"--weight-parallel-size {weight}, --context-parallel-size {context}, but there are ranks laid out as "
                f"{grid}: call destroy_model_parallel first"
            )
        return state, lambda: None
    was_joined = dist.is_initialized()
    with placed("while joining the other ranks"):
        device = start_process_group(parallel.backend, parallel.device, parallel.distributed_timeout_minutes)
    stop_watch = watch_ranks()
    state = initialize_model_parallel(tensor, pipeline, device, weight, context)

    def free() -> None:
        stop_watch()
        if is_current(state):  # others may have freed it
            destroy_model_parallel()
            if dist.is_initialized() and not was_joined:
                dist.destroy_process_group()

    return state, free
