"""The grid of ranks that an Engine works on, and torch's switches for its arithmetic. One Engine at a time."""

from __future__ import annotations

import atexit
import datetime
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megasnn.config import PretrainConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.config.training import TrainingConfig
from megasnn.engine.faults import placed, watch_ranks
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

_MKLDNN: Any = torch.backends.mkldnn
_DETERMINISTIC: Any = torch.utils.deterministic
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""Values with which cuBLAS promises the same bits in every run."""

_open: tuple[ParallelState, Callable[[], None]] | None = None
"""The grid of the Engine that is open, and its `leave`."""


def join_ranks(config: PretrainConfig) -> tuple[ParallelState, Callable[[], None]]:
    """Returns the grid of ranks of the Engine to come, with torch set up for its arithmetic, and `leave`.

    `leave` frees a grid that was made here. So does the end of the program for an Engine that nobody has closed:
    threads of Gloo that are left then would end it with an error.

    Raises:
        ValueError: another Engine is open, the grid that is there has other sizes, or this device does not have the
            arithmetic.
    """
    global _open
    if _open is not None:
        if _is_current(_open[0]):
            raise ValueError("another Engine is open in this process: close it first (engine.close() or `with`)")
        _open[1]()  # its grid is gone
    prepare_cublas(config.training)
    state, free_mesh = get_or_create_mesh(config.parallel)
    try:
        set_precision(config.training, state.device)
    except ValueError:
        free_mesh()
        raise

    def leave() -> None:
        global _open
        if _open is not None and _open[1] is leave:
            _open = None
            atexit.unregister(leave)
            free_mesh()

    _open = state, leave
    atexit.register(leave)
    return state, leave


def get_or_create_mesh(parallel: ParallelConfig) -> tuple[ParallelState, Callable[[], None]]:
    """Returns the grid that is there, or makes one of the ranks that torchrun has started; and what frees one that was
    made here. Collective.

    Raises:
        ValueError: the grid that is there has other sizes.
    """
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    weight, context = parallel.weight_parallel_size, parallel.context_parallel_size
    if model_parallel_is_initialized():
        state = get_parallel_state()
        grid = state.grid
        if (grid.tp, grid.pp, grid.dp_shard, grid.cp) != (tensor, pipeline, weight, context):
            raise ValueError(
                f"the flags ask for --tensor-model-parallel-size {tensor}, --pipeline-model-parallel-size {pipeline}, "
                f"--weight-parallel-size {weight}, --context-parallel-size {context}, but there are ranks laid out as "
                f"{grid}: call destroy_model_parallel first"
            )
        return state, lambda: None
    was_joined, minutes = dist.is_initialized(), parallel.distributed_timeout_minutes
    with placed("while joining the other ranks"):
        device = start_process_group(parallel.backend, parallel.device, minutes, pipeline)
    stop_watch = watch_ranks()
    with placed("while making the groups of ranks"):
        state = initialize_model_parallel(
            tp=tensor,
            pp=pipeline,
            dp_shard=weight,
            cp=context,
            device=device,
            timeout=datetime.timedelta(minutes=minutes),
        )

    def free() -> None:
        stop_watch()
        if _is_current(state):  # others may have freed it
            destroy_model_parallel()
            if dist.is_initialized() and not was_joined:
                dist.destroy_process_group()

    return state, free


def _is_current(state: ParallelState) -> bool:
    return model_parallel_is_initialized() and get_parallel_state() is state


def prepare_cublas(training: TrainingConfig) -> None:
    """Sets the environment of `--deterministic`. cuBLAS reads it with the first product on a GPU, so this comes before
    anything else of a run; in a process that has used a GPU before it changes nothing."""
    if training.deterministic and not torch.cuda.is_initialized():
        os.environ.setdefault(WORKSPACE, WORKSPACES[0])


def set_precision(training: TrainingConfig, device: torch.device) -> None:
    """Sets rounding of products and deterministic algorithms in torch, for the whole process.

    Raises:
        ValueError: this device does not have such arithmetic.
    """
    rounds, deterministic = PRECISIONS[training.precision].rounds, training.deterministic
    if rounds and device.type != "cuda":
        raise ValueError(f"--precision tf32 is for GPUs, and this rank computes on a {device.type.upper()}: use fp32")
    if rounds and not takes_tf32(device):
        raise ValueError(
            f"--precision tf32 needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or more, and "
            f"{torch.cuda.get_device_name(device)} has no tensor cores for it: use --precision fp32"
        )
    if deterministic and device.type == "cuda" and os.environ.get(WORKSPACE) not in WORKSPACES:
        raise ValueError(
            f"--deterministic with {WORKSPACE}={os.environ.get(WORKSPACE, '(not set)')}: cuBLAS gives the same bits in "
            f"every run with {' or '.join(WORKSPACES)} only; set one of them before the process starts"
        )
    let_products_round(rounds)
    # On a CPU too products of float32 are IEEE, whatever torch.set_float32_matmul_precision was given before.
    _MKLDNN.matmul.fp32_precision = _MKLDNN.conv.fp32_precision = "ieee"
    # Parts of a sum in bfloat16 are added in float32.
    CUBLAS.allow_bf16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(deterministic)
    CUDNN.deterministic = deterministic
    if deterministic:
        CUDNN.benchmark = False
        # torch would fill all new memory, for programs that read what they have not written.
        _DETERMINISTIC.fill_uninitialized_memory = False


def describe_precision(training: TrainingConfig, device: torch.device) -> list[str]:
    """Returns lines for the log about arithmetic where there is a choice: on a GPU."""
    if device.type != "cuda":
        return []
    products = (
        "products of fp32 round their operands to 11 bits: TF32 is on in cuDNN and cuBLAS"
        if PRECISIONS[training.precision].rounds
        else "products of fp32 are IEEE: TF32 is off in cuDNN and cuBLAS"
    )
    algorithms = "deterministic algorithms only" if training.deterministic else "algorithms of its own choice"
    benchmark = "on" if CUDNN.benchmark else "off"
    return [f"{products}; sums of bf16 products are taken in fp32; cuDNN: {algorithms}, benchmark {benchmark}"]
