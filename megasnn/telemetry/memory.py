"""Peak memory of a rank, in MB (10^6 bytes)."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

_RANKS_ONE_BY_ONE = 8


def peak_memory_mb(device: torch.device) -> float:
    """The largest amount of memory that this rank has held since it began, or since `reset_peak_memory`.

    On CUDA, what the tensors of this process held on `device`. On the CPU, the resident memory of the whole
    process: interpreter and libraries are part of it, so compare with a figure taken right after the imports.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return _peak_resident_bytes() / 1e6


def held_memory_mb(device: torch.device) -> float:
    """What this rank holds now, counted as `peak_memory_mb` counts; on a CPU outside Linux its peak so far."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 1e6
    return (_own_status("VmRSS:") or _peak_resident_bytes()) / 1e6


def reset_peak_memory(device: torch.device) -> bool:
    """Starts the peak anew from what is held now. False where the system cannot (CPU outside Linux)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def gather_peak_memory_mb(device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """`peak_memory_mb` of every rank of `group`, in group order, the same list on every rank.

    A collective over `group`; None is a group of this rank alone.
    """
    peak = peak_memory_mb(device)
    if group is None:
        return [peak]
    peaks = [0.0] * group.size()
    dist.all_gather_object(peaks, peak, group=group)
    return peaks


def memory_scalars(peaks: Sequence[float], kind: str = "peak") -> dict[str, float]:
    """Scalars of the peaks of all ranks: each by itself, or of many ranks the largest and the mean.

    Args:
        kind: "peak", or "predicted" for what was foreseen.
    """
    if len(peaks) <= _RANKS_ONE_BY_ONE:
        return {f"memory/{kind}_mb_rank{rank}": peak for rank, peak in enumerate(peaks)}
    return {f"memory/{kind}_mb_largest": max(peaks), f"memory/{kind}_mb_mean": sum(peaks) / len(peaks)}


def _peak_resident_bytes() -> int:
    # getrusage's maximum survives exec: a rank begun by a large launcher would report the launcher's memory.
    # Linux keeps the high-water mark of this very address space as well.
    own = _own_status("VmHWM:")
    if own is not None:
        return own
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _own_status(name: str) -> int | None:
    """Bytes that Linux tells of this process under a name; None elsewhere."""
    try:
        with open("/proc/self/status") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(name)), None)
    except OSError:
        return None
