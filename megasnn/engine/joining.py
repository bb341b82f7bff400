"""The grid of ranks that Engines share: the first one makes it, and the last one frees it."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import ExitStack

import torch.distributed as dist

from megasnn.comm.world import start_process_group
from megasnn.config import PretrainConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.engine.arithmetic import prepare_cublas, tell_torch, with_sums_in_rank_order
from megasnn.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    get_parallel_state,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from megasnn.process.fault import placed


class _Membership:
    """The Engines on a grid that the first of them has made; the last one to leave frees it, or the end of the program:
    threads of Gloo that are left then would end it with an error.

    Args:
        joined_here: whether the ranks have joined each other for the first Engine.
    Attributes:
        count: how many Engines there are; 0 once the grid is gone, which others may destroy, too.
    """

    def __init__(self, state: ParallelState, joined_here: bool) -> None:
        self.count, self._joined_here, self._state = 1, joined_here, state
        state.at_end.callback(self._end)
        atexit.register(self._leave_behind)

    def leave(self) -> None:
        if self.count > 1:
            self.count -= 1
        elif self.count == 1:
            destroy_model_parallel()
            if self._joined_here:
                dist.destroy_process_group()

    def _end(self) -> None:
        global _membership
        self.count, _membership = 0, None
        atexit.unregister(self._leave_behind)

    def _leave_behind(self) -> None:
        """For Engines that nobody has closed. After an error others may be gone, and nothing is to wait for them."""
        if not any(handle.is_kept for handle in self._state.handles()):
            self.count = 1
            self.leave()


_membership: _Membership | None = None
"""Of the grid that there is; None where there is none, or somebody else has made it."""


def joined(config: PretrainConfig) -> tuple[ParallelState, Callable[[], None]]:
    """The grid of ranks, and torch set up for its arithmetic; and what leaves the grid and takes the settings back.

    Raises:
        ValueError: the grid that is there has other sizes; the arithmetic is not that of this device, or of an Engine
            that is open.
    """
    prepare_cublas(config.training)
    state, leave = _on_grid(config.parallel)
    with ExitStack() as undo:
        undo.callback(leave)
        take_back = tell_torch(config.training, state.device)
        state.at_end.callback(take_back)  # who destroys the grid ends the Engines on it
        undo.callback(take_back)
        leave = undo.pop_all().close
    return with_sums_in_rank_order(state) if config.training.deterministic else state, leave


def _on_grid(parallel: ParallelConfig) -> tuple[ParallelState, Callable[[], None]]:
    """The grid of ranks that is there, or one that is made of the ranks that torchrun has started; and what leaves it,
    and frees one that was made here when no other Engine is on it.

    Raises:
        ValueError: the grid that is there has other sizes.
    """
    global _membership
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    weight, context = parallel.weight_parallel_size, parallel.context_parallel_size
    if model_parallel_is_initialized():
        state = get_parallel_state()
        grid = state.grid
        if (grid.tensor, grid.pipeline, grid.weight, grid.context) != (tensor, pipeline, weight, context):
            also = f", with --weight-parallel-size {weight}," if (weight, grid.weight) != (1, 1) else ""
            also += f", with --context-parallel-size {context}," if (context, grid.context) != (1, 1) else ""
            raise ValueError(
                f"--tensor-model-parallel-size {tensor} and --pipeline-model-parallel-size {pipeline}{also} are asked "
                f"for, but there are ranks laid out as {state.grid}: close the Engine that made them"
            )
        if _membership is None:
            return state, lambda: None
        _membership.count += 1
        return state, _membership.leave
    was_joined = dist.is_initialized()
    with placed("while joining the other ranks"):
        device = start_process_group(parallel.backend, parallel.device, parallel.distributed_timeout_minutes)
    state = initialize_model_parallel(tensor, pipeline, device, weight, context)
    _membership = _Membership(state, dist.is_initialized() and not was_joined)
    return state, _membership.leave
