"""What a message between two stages, or two replicas, costs: seconds on the way, and of either end's processor."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from megasnn.comm.group import Group
from megasnn.pipeline.costs import LinkCost

MESSAGES = 8
SMALL, LARGE = 1 << 10, 1 << 22  # bytes


def measure_link(group: Group, device: torch.device) -> LinkCost:
    """Between the first two ranks of a group, stages or replicas, the same on both; no cost on the others. Collective
    over these two."""
    if group.rank > 1 or group.size == 1:
        return LinkCost()
    small, _ = _round_trips(group, device, SMALL)
    large, processor = _round_trips(group, device, LARGE)
    latency = small / 2
    per_byte = max(large - small, 0.0) / LARGE
    busy = torch.zeros(2, dtype=torch.float64, device=device)
    if device.type == "cpu" and _all_cores_compute(group):
        busy[group.rank] = processor / LARGE
    _exchange(group, busy)
    # More than the whole time would be noise, or threads that wait by spinning.
    sender, receiver = (min(value, per_byte / 2) for value in busy.tolist())
    return LinkCost(latency, per_byte, sender, receiver)


def _round_trips(group: Group, device: torch.device, size: int) -> tuple[float, float]:
    """Seconds from a message of the first rank until a small answer is there, and of this process meanwhile.

    Of several times the least: what else the machine does lengthens the others, of small messages as of large ones.
    """
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    answer = torch.zeros(SMALL, dtype=torch.uint8, device=device)
    times, processor = [], []
    for _ in range(MESSAGES + 1):
        start, used = _now(device), time.process_time()
        if group.rank == 0:
            _transfer(group, message, sends=True)
            _transfer(group, answer, sends=False)
        else:
            _transfer(group, message, sends=False)
            _transfer(group, answer, sends=True)
        times.append(_now(device) - start)
        processor.append(time.process_time() - used)
    return min(times[1:]), sorted(processor[1:])[MESSAGES // 2]


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
