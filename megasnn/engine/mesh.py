"""The grid of ranks that an Engine works on, and torch's switches for its arithmetic."""

from __future__ import annotations

import atexit
import datetime
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megasnn.config import PretrainConfig
from megasnn.config.training import TrainingConfig
from megasnn.device_checks import placed
from megasnn.engine.faults import watch_ranks
from megasnn.kernels.tensor_cores import CAPABILITY, CUBLAS, CUDNN, let_products_round, takes_tf32
from megasnn.parallel.process_group import start_process_group
from megasnn.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    get_parallel_state,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from megasnn.precisions import PRECISIONS

# Settings that are unknown to type checkers.
_MKLDNN: Any = torch.backends.mkldnn
_DETERMINISTIC: Any = torch.utils.deterministic


def join_ranks(config: PretrainConfig) -> tuple[ParallelState, Callable[[], None]]:
    """Returns the grid that is there, or makes one of the ranks that torchrun has started, and what frees one that was
    made here, at the end of the program at the latest: threads of Gloo that are left then would end it with an error.
    Sets torch up for the run's arithmetic. Collective.

    Raises:
        ValueError: the grid that is there has other sizes, or this device does not have the arithmetic.
    """
    parallel, training = config.parallel, config.training
    if training.deterministic and not torch.cuda.is_initialized():
        # With this alone cuBLAS promises the same bits in every run; it reads it with the first product on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    stages, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    sizes = {"tp": tp, "pp": stages, "dp_shard": parallel.weight_parallel_size, "cp": parallel.context_parallel_size}
    if model_parallel_is_initialized():
        state = get_parallel_state()
        if (asked := replace(state.grid, **sizes)) != state.grid:
            raise ValueError(f"the flags ask for {asked}, and ranks are laid out as {state.grid}: make them equal")
        set_precision(training, state.device)
        return state, lambda: None
    was_joined, minutes = dist.is_initialized(), parallel.distributed_timeout_minutes
    with placed("while joining the other ranks"):
        device = start_process_group(parallel.device, minutes, stages=stages)
        watch = watch_ranks()
        state = initialize_model_parallel(**sizes, device=device, timeout=datetime.timedelta(minutes=minutes))

    def leave() -> None:
        atexit.unregister(leave)
        if watch is not None:
            watch.stop()
        if model_parallel_is_initialized() and get_parallel_state() is state:  # others may have freed it
            destroy_model_parallel()
            if dist.is_initialized() and not was_joined:
                dist.destroy_process_group()

    atexit.register(leave)
    try:
        set_precision(training, state.device)
    except ValueError:
        leave()
        raise
    return state, leave


def set_precision(training: TrainingConfig, device: torch.device) -> None:
    """Sets rounding of products and deterministic algorithms in torch, for the whole process. Raises ValueError for
    arithmetic that this device does not have."""
    rounds, deterministic = PRECISIONS[training.precision].rounds, training.deterministic
    if rounds and device.type != "cuda":
        raise ValueError(f"--precision tf32 is for GPUs, and this rank computes on a {device.type.upper()}: use fp32")
    if rounds and not takes_tf32(device):
        raise ValueError(
            f"--precision tf32 needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or more, and "
            f"{torch.cuda.get_device_name(device)} has no tensor cores for it: use --precision fp32"
        )
    let_products_round(rounds)
    # On a CPU too products of float32 are IEEE, whatever torch.set_float32_matmul_precision was given before.
    _MKLDNN.matmul.fp32_precision = _MKLDNN.conv.fp32_precision = "ieee"
    CUBLAS.allow_bf16_reduced_precision_reduction = False  # parts of a sum are added in float32
    torch.use_deterministic_algorithms(deterministic)
    CUDNN.deterministic = deterministic
    if deterministic:
        CUDNN.benchmark = False
        # torch would fill all new memory, for programs that read what they have not written.
        _DETERMINISTIC.fill_uninitialized_memory = False
