"""How a process joins the others that torchrun has started, and on which device it computes."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By device. What hosts tell each other never waits for a GPU."""


def why_no_gpu() -> str:
    """Why torch has none, as far as it knows, and what to look at."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; https://pytorch.org/get-started has builds with it"
    return (
        f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and finds none; see whether nvidia-smi "
        "lists one, its driver is recent enough for that CUDA, and CUDA_VISIBLE_DEVICES does not hide it"
    )


def start_process_group(backend: str = "auto", device: str = "auto", timeout_minutes: float = 10.0) -> torch.device:
    """Joins the ranks that torchrun started, once; a process started alone stays alone.

    NCCL where every rank of this machine has a GPU of its own, otherwise Gloo on the CPU.

    Returns:
        the device of this rank.
    Raises:
        ValueError: as `device_of_rank`.
        ConnectionError: the other ranks did not come in time.
    """
    chosen = device_of_rank(backend, device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        name = "gloo" if backend == "gloo" else BACKENDS[chosen.type]
        try:
            _join_world(name, datetime.timedelta(minutes=timeout_minutes))
        except dist.DistError as error:
            raise ConnectionError(
                f"the {os.environ['WORLD_SIZE']} ranks did not come together within --distributed-timeout-minutes "
                f"{timeout_minutes:g}: did one of them end before, with an error of its own? ({error})"
            ) from error
    return chosen


def device_of_rank(backend: str, device: str) -> torch.device:
    """The device of this rank; nothing is begun on it. With Gloo and GPUs, several ranks may share one.

    Raises:
        ValueError: CUDA or NCCL asked for where there is none for this rank.
    """
    local_rank, local_ranks, gpus = int(os.environ.get("LOCAL_RANK", "0")), _local_ranks(), torch.cuda.device_count()
    kind = kind_of_device(device)
    shares = backend == "gloo" and gpus > 0
    if kind == "cuda" and not gpus:
        raise ValueError(f"--device cuda, and torch finds no GPU: {why_no_gpu()}; or use --device cpu")
    if kind == "cuda" and gpus < local_ranks and not shares:
        raise ValueError(
            f"--device cuda with {local_ranks} ranks on this machine, which has {gpus} GPU(s); ranks share a GPU with "
            "--backend gloo only"
        )
    if backend == "nccl" and kind != "cuda":
        raise ValueError(f"--backend nccl needs a GPU for each rank; {local_ranks} rank(s), {gpus} GPU(s): use gloo")
    return torch.device(kind, local_rank % gpus) if kind == "cuda" else torch.device("cpu")


def kind_of_device(asked: str) -> str:
    """What `--device` comes to for the ranks of this machine, cpu or cuda."""
    return ("cuda" if torch.cuda.device_count() >= _local_ranks() else "cpu") if asked == "auto" else asked


def why_not_on_gpus(asked: str) -> str | None:
    """Why `--device auto` comes to the CPU where somebody may expect GPUs; None where nobody does."""
    if asked != "auto" or kind_of_device(asked) == "cuda":
        return None
    if gpus := torch.cuda.device_count():
        return f"{_local_ranks()} ranks on this machine and {gpus} GPU(s); they share with --backend gloo --device cuda"
    return None if torch.version.cuda is None else why_no_gpu()


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


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
