"""Joining the ranks that torchrun started: the device of each, and the process group of all."""

from __future__ import annotations

import datetime
import os
import sys
import threading

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By device. What hosts tell each other never waits for a GPU."""


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
                BACKENDS[chosen.type], store=store, rank=rank, world_size=world_size, timeout=timeout
            )
        except dist.DistError as error:
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


def choose_device(asked: str) -> tuple[torch.device, str]:
    """Chooses the device of this rank; nothing is begun on it.

    Args:
        asked: `--device`.

    Returns:
        The device, and why it is not a GPU where somebody may expect one; "" elsewhere.

    Raises:
        ValueError: CUDA asked for where there is none for this rank.
    """
    gpus, cuda, why = torch.cuda.device_count(), torch.version.cuda, ""
    local_rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
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
