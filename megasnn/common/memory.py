"""Memory in MB (10^6 bytes): the host's by Linux's count, tensors' by allocations; copies to a GPU."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch.profiler import record_function

_TRIM_THRESHOLD = -1  # parameter numbers of glibc's mallopt
_MMAP_THRESHOLD = -3
_LARGEST_TRIM = 2**31 - 1  # largest values mallopt accepts
_LARGEST_MMAP = 32 * 1024 * 1024
_ARRAY = "bytes of arrays:"
_RELEASE_SECONDS = 1e-3
CGROUP = Path("/sys/fs/cgroup")


def keep_free_memory() -> None:
    """Lets glibc keep freed memory, up to blocks of 32 MiB, its largest threshold."""
    # Each step allocates the same blocks. By default glibc returns some to the system, which clears them page by page:
    # 25,000 pages in a step of 8 images, 8 % of its time. Decoding event samples is a tenth faster without this.
    # A user who sets MALLOC_... or GLIBC_TUNABLES has chosen otherwise.
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        # A C library other than glibc.
        return
    set_option(_MMAP_THRESHOLD, _LARGEST_MMAP)
    set_option(_TRIM_THRESHOLD, _LARGEST_TRIM)


def release_free_memory() -> None:
    if sys.platform == "linux":
        try:
            # A restarted peak would miss tensors that fit in kept memory.
            ctypes.CDLL(None).malloc_trim(0)
        except AttributeError:
            # A C library other than glibc.
            pass


def copy_without_waiting(values: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. The host does not wait."""
    # A GPU copies from pinned memory in the order of its current stream; from pageable memory the host would wait.
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def peak_memory_mb(device: torch.device) -> float:
    """This rank's peak since its start or `reset_peak_memory`.

    On a GPU: tensors. On a CPU: the process's resident memory, libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return _resident("VmHWM") / 1e6


def resident_memory_mb(device: torch.device) -> float:
    """This rank's current memory, as in `peak_memory_mb`."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 1e6
    return _resident("VmRSS") / 1e6


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # 5 resets VmHWM (Linux, proc(5)).
        Path("/proc/self/clear_refs").write_text("5")


def available_memory_mb(device: torch.device) -> float:
    """Memory that this machine or device still has. On a CPU all processes of the machine share it.

    A container's limit counts (cgroup v2).
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # The allocator's unused blocks are free, too.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (free + unused) / 1e6
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = CGROUP / Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/")
    for folder in (group, CGROUP):
        with suppress(OSError, ValueError):
            # No such file, or no limit.
            limit = int((folder / "memory.max").read_text())
            available = min(available, limit - int((folder / "memory.current").read_text()))
    return available / 1e6


def memory_scalars(peaks: Sequence[float], kind: str = "peak") -> dict[str, float]:
    """Maximum and mean over all ranks."""
    if not peaks:
        return {}
    return {f"memory/{kind}_mb_largest": max(peaks), f"memory/{kind}_mb_mean": sum(peaks) / len(peaks)}


def processor_name() -> str:
    return _proc_value("/proc/cpuinfo", "model name")


def _resident(name: str) -> int:
    # getrusage's maximum survives exec: a rank started by a large launcher would report the launcher's memory.
    kilobytes = _proc_value("/proc/self/status", name)
    return 1024 * int(kilobytes.removesuffix("kB")) if kilobytes else 0


def _proc_value(file: str, name: str) -> str:
    """The first value of this name, as "name: value" in a line; empty without one."""
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""


class AllocationCounter:
    """Counts bytes allocated on a device: exact, and the same in every run.

    On a CPU: torch's allocations and `counted_array`. On a GPU: torch's allocator's count.

    Attributes:
        allocated: bytes above the start.
        peak: largest `allocated` inside the last `counting`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.allocated = 0
        self.peak = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts inside. Must not be nested or run in a trace of torch.profiler."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
            yield
            self.peak = self.allocated + torch.cuda.max_memory_allocated(self._device) - before
            self.allocated += torch.cuda.memory_allocated(self._device) - before
            return
        config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        # Garbage may hold memory allocated before the block; torch warns of its release.
        collects_garbage = gc.isenabled()
        gc.disable()
        _enable_profiler_legacy(config)
        _counting.append(self)
        try:
            yield
        finally:
            _counting.remove(self)
            events = _disable_profiler_legacy()
            if collects_garbage:
                gc.enable()
        self.peak = self.allocated
        for event in chain.from_iterable(events):
            if event.kind() == "memory_alloc":
                self.allocated += event.cpu_memory_usage()
            elif event.name().startswith(_ARRAY):
                self.allocated += int(event.name().removeprefix(_ARRAY))
            self.peak = max(self.peak, self.allocated)


_counting: list[AllocationCounter] = []  # counters at work on a CPU


def let_others_go() -> None:
    """If memory is counted, waits until a collective's thread released its tensors."""
    # The count sees releases of this thread only, so this thread must be the last owner.
    if _counting:
        time.sleep(_RELEASE_SECONDS)


def counted_array(array: np.ndarray) -> np.ndarray:
    if _counting:
        _mark(array.nbytes)
        # torch does not see arrays.
        weakref.finalize(array, _mark, -array.nbytes)
    return array


def _mark(size: int) -> None:
    if _counting:
        with record_function(f"{_ARRAY}{size}"):
            pass
