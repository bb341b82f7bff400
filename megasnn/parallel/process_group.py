"""Joining the ranks that torchrun started: their devices, the process group, the grid, the precision of torch."""

from __future__ import annotations

import atexit
import datetime
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megasnn.common.checks import error_context
from megasnn.config import PretrainConfig
from megasnn.config.training import PRECISIONS, TrainingConfig
from megasnn.kernels.layout import CAPABILITY, CUBLAS, CUDNN, let_products_round, takes_tf32
from megasnn.parallel.faults import watch_ranks
from megasnn.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    get_parallel_state,
    initialize_model_parallel,
    model_parallel_is_initialized,
)

COMMUNICATION_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By device. What hosts tell each other never waits for a GPU."""
# Settings that are unknown to type checkers.
_MKLDNN: Any = torch.backends.mkldnn
_DETERMINISTIC: Any = torch.utils.deterministic


def start_process_group(device: str = "auto", timeout_minutes: float = 10.0, stages: int = 1) -> torch.device:
    """Joins the ranks that torchrun started, once; a process started alone stays alone.

    NCCL where every rank of this machine has a GPU of its own, otherwise Gloo on the CPU. In a pipeline of several
    stages kernels are loaded with their libraries: one that is loaded at its first launch waits for all that the GPU
    does, a posted receive included.

    Returns:
        the device of this rank.
    Raises:
        ValueError: as `choose_device`.
        ConnectionError: the other ranks did not come in time.
    """
    if stages > 1:
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    (chosen, _), timeout = choose_device(device), datetime.timedelta(minutes=timeout_minutes)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        problem = (
            f"the {os.environ['WORLD_SIZE']} ranks did not come together within --distributed-timeout-minutes "
            f"{timeout_minutes:g}: did one of them end before, with an error of its own, or does another program "
            f"listen at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}?"
        )
        try:
            store, rank, world_size = _meet(timeout, problem)
            dist.init_process_group(
                COMMUNICATION_BACKENDS[chosen.type], store=store, rank=rank, world_size=world_size, timeout=timeout
            )
        except (dist.DistError, OSError) as error:  # OSError: another program holds the port
            raise ConnectionError(f"{problem} ({error})") from error
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
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        if not is_torchruns and _is_loopback(os.environ.get("MASTER_ADDR", "")):
            return _meet_on_this_host(timeout)
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    finally:
        limit.cancel()
    if not is_torchruns:
        return store, rank, world_size
    # A change of nodes starts all ranks anew without counting as a restart: so the arrivals are counted.
    name = f"megasnn/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{world_size}"
    start = (store.add(f"{name}/arrivals", 1) - 1) // world_size
    return dist.PrefixStore(f"{name}/{start}", store), rank, world_size


def _is_loopback(host: str) -> bool:
    """Tells whether a name or address is reached from this host alone."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _meet_on_this_host(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """Returns a store on the loopback, and this rank and their number: torch's store listens on all interfaces, and
    trusts everyone."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listener: int | None = None
    if rank == 0:
        family = socket.AF_INET6 if host == "::1" else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN).detach()
    store = dist.TCPStore(host, port, size, rank == 0, timeout, multi_tenant=True, master_listen_fd=listener)
    return store, rank, size


def _give_up(problem: str) -> None:
    sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] ConnectionError: {problem}\n")
    sys.stderr.flush()
    os._exit(1)


def choose_device(asked: str) -> tuple[torch.device, str]:
    """Chooses the device of this rank; nothing is begun on it.

    Args:
        asked: `--device`.

    Returns:
        The device, and why it is not a GPU where somebody may expect one; "" elsewhere.

    Raises:
        ValueError: CUDA asked for where there is none for this rank, or ranks that do not know their number on a host.
    """
    gpus, cuda, why = torch.cuda.device_count(), torch.version.cuda, ""
    local_rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpus > 1 and asked != "cpu" and "LOCAL_RANK" not in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and LOCAL_RANK is not set: all ranks of this host would take "
            f"one of its {gpus} GPUs; set LOCAL_RANK to the rank's number on its host, or start with torchrun"
        )
    if torch.version.hip is not None:
        why = f"torch {torch.__version__} is built for ROCm {torch.version.hip}, on which MegaSNN has never run"
    elif not gpus and cuda is None:
        why = f"torch {torch.__version__} is built without CUDA; https://pytorch.org/get-started has builds with it"
    elif not gpus:
        why = (
            f"torch {torch.__version__} is built for CUDA {cuda} and finds no GPU; see whether nvidia-smi lists one, "
            "its driver is recent enough for that CUDA, and CUDA_VISIBLE_DEVICES does not hide it"
        )
    elif gpus < ranks and "CUDA_VISIBLE_DEVICES" not in os.environ:  # by it Slurm shows each rank its own
        why = f"there are {gpus} GPU(s) for {ranks} ranks, and NCCL takes one for each: start fewer ranks"
    if why and asked == "cuda":
        raise ValueError(f"--device cuda: {why}; or use --device cpu")
    if not why and asked != "cpu":
        return torch.device("cuda", local_rank % gpus), ""
    expected = asked != "cpu" and (cuda is not None or torch.version.hip is not None)
    return torch.device("cpu"), why if expected else ""


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
    with error_context("while joining the other ranks"):
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
