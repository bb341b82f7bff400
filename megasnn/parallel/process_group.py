"""Joining the ranks that torchrun started: the device of each, and the process group of all."""

from __future__ import annotations

import datetime
import os
import socket
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
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        problem = (
            f"the {os.environ['WORLD_SIZE']} ranks did not come together within --distributed-timeout-minutes "
            f"{timeout_minutes:g}: did one of them end before, with an error of its own, or does another program "
            f"listen at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}?"
        )
        try:
            store, rank, world_size = _meet(timeout, problem)
            _find_place(store, device)
            chosen, _ = choose_device(device)
            if chosen.type == "cuda":
                torch.cuda.set_device(chosen)
            dist.init_process_group(
                BACKENDS[chosen.type], store=store, rank=rank, world_size=world_size, timeout=timeout
            )
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


def choose_device(asked: str) -> tuple[torch.device, str]:
    """Chooses the device of this rank; nothing is begun on it.

    Args:
        asked: `--device`.

    Returns:
        The device, and why it is not a GPU where somebody may expect one; "" elsewhere.

    Raises:
        ValueError: CUDA asked for where there is none for this rank.
    """
    gpus, ranks, cuda = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.version.cuda
    # Before ranks have met: as if all of this machine saw the same if there are enough, or else this one its own.
    place, sharing = _place or ((int(os.environ.get("LOCAL_RANK", "0")), ranks) if gpus >= ranks else (0, 1))
    why = ""
    if torch.version.hip is not None:
        why = f"torch {torch.__version__} is built for ROCm {torch.version.hip}, on which MegaSNN has never run"
    elif not gpus and cuda is None:
        why = f"torch {torch.__version__} is built without CUDA; https://pytorch.org/get-started has builds with it"
    elif not gpus:
        why = (
            f"torch {torch.__version__} is built for CUDA {cuda} and finds no GPU; see whether nvidia-smi lists one, "
            "its driver is recent enough for that CUDA, and CUDA_VISIBLE_DEVICES does not hide it"
        )
    elif gpus < sharing:
        why = f"{sharing} ranks see the same {gpus} GPU(s), and NCCL takes one for each: start fewer ranks"
    if why and asked == "cuda":
        raise ValueError(f"--device cuda: {why}; or use --device cpu")
    if not why and asked != "cpu":
        return torch.device("cuda", place % gpus), ""
    expected = asked != "cpu" and (cuda is not None or torch.version.hip is not None)
    return torch.device("cpu"), why if expected else ""
