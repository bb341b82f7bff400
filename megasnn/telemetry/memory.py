"""Memory of a rank in MB (10^6 bytes), as Linux counts it, and the name of the processor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


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


def reset_peak_memory(device: torch.device) -> None:
    """Starts the peak anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def memory_scalars(peaks: Sequence[float], kind: str = "peak") -> dict[str, float]:
    """Returns the largest and the mean of all ranks as scalars; none without ranks. `kind`: peak or predicted."""
    if not peaks:
        return {}
    return {f"memory/{kind}_mb_largest": max(peaks), f"memory/{kind}_mb_mean": sum(peaks) / len(peaks)}


def processor_name() -> str:
    """Returns the processor's name as Linux tells it; "" where it does not."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _resident(name: str) -> int:
    """Bytes of this process from /proc/self/status. getrusage's maximum survives exec: a rank begun by a large launcher
    would report the launcher's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)
