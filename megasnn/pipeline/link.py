"""Cost of a message between two stages, or two replicas: seconds on the way, and of either end's processor."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from megasnn.parallel_state import Group
from megasnn.pipeline.cost_model import LinkCost

MESSAGES = 8
SMALL, LARGE = 1 << 10, 1 << 22  # bytes


def measure_link(group: Group, device: torch.device) -> LinkCost:
    """Between the first two ranks of a group, stages or replicas, the same on both; no cost on the others. Collective
    over these two."""
    if group.rank > 1 or group.size == 1:
        return LinkCost()
    small, large, processor = _round_trips(group, device)
    latency, per_byte = small / 2, seconds_per_byte(small, large)
    busy = torch.zeros(2, dtype=torch.float64, device=device)
    if device.type == "cpu" and _all_cores_compute(group):
        busy[group.rank] = processor / LARGE
    _exchange(group, busy)
    # More than the whole time would be noise, or threads that wait by spinning.
    sender, receiver = (min(value, per_byte / 2) for value in busy.tolist())
    return LinkCost(latency, per_byte, sender, receiver)


def seconds_per_byte(small: float, large: float) -> float:
    """Seconds of a byte, from round trips with a small and with a large message, in seconds.

    Where a busy machine made the small one as slow, the whole of the large one: a link whose bytes are free would be
    planned on.
    """
    return (large - small if large > small else large) / LARGE


def _round_trips(group: Group, device: torch.device) -> tuple[float, float, float]:
    """Seconds from a small and from a large message of the first rank until a small answer is there, and of this
    process during a large one.

    Small and large by turns, and of several times the least: what else the machine does lengthens the others.
    """
    messages = [torch.zeros(size, dtype=torch.uint8, device=device) for size in (SMALL, LARGE)]
    times: list[list[float]] = [[], []]
    processor = []
    for _ in range(MESSAGES + 1):
        for message, found in zip(messages, times, strict=True):
            start, used = _now(device), time.process_time()
            _there_and_back(group, message, messages[0])
            found.append(_now(device) - start)
        processor.append(time.process_time() - used)
    small, large = (min(found[1:]) for found in times)
    return small, large, sorted(processor[1:])[MESSAGES // 2]


def _there_and_back(group: Group, message: torch.Tensor, answer: torch.Tensor) -> None:
    _transfer(group, message, sends=group.rank == 0)
    _transfer(group, answer, sends=group.rank != 0)


def _exchange(group: Group, values: torch.Tensor) -> None:
    """Both ends get the other's element of `values` [2]."""
    mine, theirs = values[group.rank : group.rank + 1].clone(), values.new_empty(1)
    for sender in (0, 1):
        sends = group.rank == sender
        _transfer(group, mine if sends else theirs, sends)
    values[1 - group.rank] = theirs[0]


def _transfer(group: Group, tensor: torch.Tensor, sends: bool) -> None:
    peer = group.ranks[1 - group.rank]
    work = (dist.isend if sends else dist.irecv)(tensor, peer, group=group.handle)
    assert work is not None
    work.wait()


def _all_cores_compute(group: Group) -> bool:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ranks_here * torch.get_num_threads() >= cores


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
