"""Joining torchrun's ranks: device, process group, grid, and torch's precision."""

from __future__ import annotations

import atexit
import datetime
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megasnn.common.checks import error_context
from megasnn.common.files import quantity
from megasnn.config import PretrainConfig
from megasnn.config.training import PRECISIONS, TrainingConfig
from megasnn.kernels.layout import CUBLAS, CUDNN, TF32_CAPABILITY, let_products_round, takes_tf32
from megasnn.parallel.faults import watch_ranks
from megasnn.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    form_grid,
    get_parallel_state,
    model_parallel_is_initialized,
)

# By device. Gloo carries messages between hosts, which must not wait for a GPU.
COMMUNICATION_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

# torch's type stubs do not know these settings.
_MKLDNN: Any = torch.backends.mkldnn
_DETERMINISTIC: Any = torch.utils.deterministic


def start_process_group(device: str = "auto", timeout_minutes: float = 10.0, stages: int = 1) -> torch.device:
    """Joins torchrun's ranks, once, and returns this rank's device. A single process joins nobody.

    Raises:
        ValueError: see `choose_device`.
        ConnectionError: the other ranks did not join in time.
    """
    # A kernel loaded lazily at its first launch waits for all work of the GPU, a posted receive included.
    if stages > 1:
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    chosen, _ = choose_device(device)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        problem = (
            f"the {os.environ['WORLD_SIZE']} ranks did not meet within --distributed-timeout-minutes "
            f"{timeout_minutes:g}: look for an earlier error of another rank, and for another program that listens at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        )
        try:
            store, rank, world_size = _meet(timeout, problem)
            dist.init_process_group(
                COMMUNICATION_BACKENDS[chosen.type], store=store, rank=rank, world_size=world_size, timeout=timeout
            )
        except (dist.DistError, OSError) as error:
            # OSError: another program uses the port.
            raise ConnectionError(f"{problem} ({error})") from error
    return chosen


def _meet(timeout: datetime.timedelta, problem: str) -> tuple[dist.Store, int, int]:
    """(store, rank, number of ranks), also after a restart by torchrun."""
    # torch waits without a limit for a program that accepts the connection and never answers.
    limit = threading.Timer(timeout.total_seconds() + 5, _give_up, [problem])
    limit.daemon = True
    limit.start()
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = os.environ.get("MASTER_ADDR", "")
    is_loopback = host in ("localhost", "::1") or host.startswith("127.")
    try:
        if not is_torchruns and is_loopback:
            return _meet_on_this_host(timeout)
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    finally:
        limit.cancel()
    if not is_torchruns:
        return store, rank, world_size
    # After a restart torchrun's store still holds the addresses of the previous ranks under the same keys, and a rank
    # reading them early would connect to a dead peer. Each start therefore has its own prefix. A change of nodes
    # restarts all ranks without counting as a restart, so arrivals are counted.
    name = f"megasnn/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{world_size}"
    start = (store.add(f"{name}/arrivals", 1) - 1) // world_size
    return dist.PrefixStore(f"{name}/{start}", store), rank, world_size


def _meet_on_this_host(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """`_meet` with a store on the loopback interface."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    listener: int | None = None
    if rank == 0:
        family = socket.AF_INET6 if host == "::1" else socket.AF_INET
        # torch's own listener accepts connections from any host.
        listener = socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN).detach()
    store = dist.TCPStore(host, port, world_size, rank == 0, timeout, multi_tenant=True, master_listen_fd=listener)
    return store, rank, world_size


def _give_up(problem: str) -> None:
    sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] ConnectionError: {problem}\n")
    sys.stderr.flush()
    os._exit(1)


def choose_device(asked: str) -> tuple[torch.device, str]:
    """This rank's device, not yet initialised, and why it is not an expected GPU ("" otherwise).

    A rank gets a GPU if each rank on this machine can have its own.

    Raises ValueError if CUDA is asked for and unavailable, or if ranks do not know their number on this host.
    """
    gpus = torch.cuda.device_count()
    has_gpu_build = torch.version.cuda is not None or torch.version.hip is not None
    world_size = os.environ.get("WORLD_SIZE", "1")
    if gpus > 1 and asked != "cpu" and "LOCAL_RANK" not in os.environ and world_size != "1":
        raise ValueError(
            f"WORLD_SIZE is {world_size} and LOCAL_RANK is not set, so all ranks of this host would use one of its "
            f"{gpus} GPUs: set LOCAL_RANK to the rank's number on its host, or start with torchrun"
        )
    if asked == "cpu":
        return torch.device("cpu"), ""
    reason = _missing_gpu(gpus)
    if not reason:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus), ""
    if asked == "cuda":
        raise ValueError(f"--device cuda: {reason}; or use --device cpu")
    return torch.device("cpu"), reason if has_gpu_build else ""


def _missing_gpu(gpus: int) -> str:
    """Why this rank gets no GPU, and a remedy; "" if it gets one."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is built for ROCm {torch.version.hip}, on which MegaSNN has never run"
    if not gpus and torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; https://pytorch.org/get-started has builds with it"
    if not gpus:
        return (
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and finds no GPU; check that nvidia-smi "
            "lists one, that its driver supports this CUDA version, and that CUDA_VISIBLE_DEVICES does not hide it"
        )
    # Slurm sets CUDA_VISIBLE_DEVICES to show each rank its own GPU.
    if gpus < ranks and "CUDA_VISIBLE_DEVICES" not in os.environ:
        return f"{quantity(gpus, 'GPU')} for {ranks} ranks, and NCCL needs one for each: start fewer ranks"
    return ""


def existing_state(config: PretrainConfig) -> ParallelState:
    """The grid of this process, in the precision of the flags.

    Raises ValueError if it has other sizes than the flags, or the device lacks the precision.
    """
    _let_cublas_repeat(config.training)
    state = get_parallel_state()
    asked = config.parallel.grid.over_ranks(state.grid.world_size)
    if asked != state.grid:
        raise ValueError(f"the flags ask for the grid {asked}, but the ranks form {state.grid}: make them equal")
    set_precision(config.training, state.device)
    return state


def join_ranks(config: PretrainConfig) -> tuple[ParallelState, Callable[[], None]]:
    """A new grid of all ranks in the flags' precision, and a function that leaves it. Collective.

    The ranks leave at the program's end at the latest. Raises ValueError if the device lacks the precision.
    """
    parallel = config.parallel
    training = config.training
    _let_cublas_repeat(training)
    was_joined = dist.is_initialized()
    minutes = parallel.distributed_timeout_minutes
    with error_context("while joining the other ranks"):
        device = start_process_group(parallel.device, minutes, stages=parallel.grid.pp)
        watch = watch_ranks()
        state = form_grid(parallel.grid, device, datetime.timedelta(minutes=minutes))

    def leave() -> None:
        atexit.unregister(leave)
        if watch is not None:
            watch.stop()
        # The caller may have freed the grid already.
        if model_parallel_is_initialized() and get_parallel_state() is state:
            destroy_model_parallel()
            if dist.is_initialized() and not was_joined:
                dist.destroy_process_group()

    # Gloo threads that are alive during Python's shutdown abort the program.
    atexit.register(leave)
    try:
        set_precision(training, state.device)
    except ValueError:
        leave()
        raise
    return state, leave


def _let_cublas_repeat(training: TrainingConfig) -> None:
    """Before the GPU is initialised: cuBLAS reads its setting at the first product."""
    if training.deterministic and not torch.cuda.is_initialized():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def set_precision(training: TrainingConfig, device: torch.device) -> None:
    """For the whole process: torch's rounding in products, and determinism.

    Raises ValueError if the device lacks the precision.
    """
    rounds = PRECISIONS[training.precision].rounds
    if rounds and device.type != "cuda":
        raise ValueError(
            f"--precision tf32 is for GPUs, and this rank computes on a {device.type.upper()}: use --precision fp32"
        )
    if rounds and not takes_tf32(device):
        raise ValueError(
            f"--precision tf32 needs a GPU of compute capability {TF32_CAPABILITY[0]}.{TF32_CAPABILITY[1]} or higher, "
            f"and {torch.cuda.get_device_name(device)} lacks tensor cores for it: use --precision fp32"
        )
    let_products_round(rounds)
    # On a CPU products of float32 stay IEEE, whatever torch.set_float32_matmul_precision says.
    _MKLDNN.matmul.fp32_precision = _MKLDNN.conv.fp32_precision = "ieee"
    # Partial sums are added in float32.
    CUBLAS.allow_bf16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(training.deterministic)
    CUDNN.deterministic = training.deterministic
    if training.deterministic:
        CUDNN.benchmark = False
        # torch would fill new memory, to repeat programs that read uninitialised values.
        _DETERMINISTIC.fill_uninitialized_memory = False
