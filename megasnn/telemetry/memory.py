"""Peak memory of ranks in MB (10^6 bytes), and the name of a device."""

from __future__ import annotations

import platform
import resource
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

RANKS_ONE_BY_ONE = 8


def peak_memory_mb(device: torch.device) -> float:
    """Returns the largest memory of this rank since it began, or since `reset_peak_memory`.

    On a GPU that of tensors on `device`; on a CPU the resident memory of the process, libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return _resident("VmHWM:") / 1e6


def held_memory_mb(device: torch.device) -> float:
    """Returns the present memory of this rank, counted as `peak_memory_mb` counts."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 1e6
    return _resident("VmRSS:") / 1e6


def reset_peak_memory(device: torch.device) -> bool:
    """Starts the peak anew; False where the system cannot (a CPU outside Linux)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def gather_peak_memory_mb(device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """Returns `peak_memory_mb` of every rank of the group, in its order. Collective; None is this rank alone."""
    peak = peak_memory_mb(device)
    if group is None:
        return [peak]
    peaks = [0.0] * group.size()
    dist.all_gather_object(peaks, peak, group=group)
    return peaks


def memory_scalars(peaks: Sequence[float], kind: str = "peak") -> dict[str, float]:
    """Returns a scalar for each rank; of more than eight ranks the largest and the mean. `kind`: peak or predicted."""
    if len(peaks) <= RANKS_ONE_BY_ONE:
        return {f"memory/{kind}_mb_rank{rank}": peak for rank, peak in enumerate(peaks)}
    return {f"memory/{kind}_mb_largest": max(peaks), f"memory/{kind}_mb_mean": sum(peaks) / len(peaks)}


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def processor_name() -> str:
    """Returns the processor's name as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _resident(name: str) -> int:
    """Bytes of this process from /proc/self/status; elsewhere than on Linux its peak by getrusage.

    getrusage's maximum survives exec: a rank begun by a large launcher would report the launcher's memory.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)
