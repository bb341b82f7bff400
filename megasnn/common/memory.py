"""Memory: of the host as Linux counts it, of tensors as they are allocated, and copies to a GPU.

Memory of a rank is in MB (10^6 bytes). The count of tensors is exact, and the same in every run.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch.profiler import record_function

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's numbers of what mallopt sets
_MOST_OF_INT, _MOST_OF_MMAP = 2**31 - 1, 32 * 1024 * 1024  # the largest values that it takes
_ARRAY = "bytes of arrays:"
_LONG_ENOUGH = 1e-3  # seconds


def keep_free_memory() -> None:
    """Lets the C library keep memory that was freed, for what comes next; with glibc only.

    A step takes and frees the same blocks as the one before. By default glibc gives some of them back to the system,
    which then fills them with zeros anew, page by page: 25,000 of them in a step of 8 images, 8 % of its time. Decoding
    samples of events is a tenth faster. Blocks above 32 MiB, the most that glibc lets one set, still come and go. What
    the user has set by a variable ``MALLOC_...`` or GLIBC_TUNABLES stays.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # a C library other than glibc
    set_option(_MMAP_THRESHOLD, _MOST_OF_MMAP)
    set_option(_TRIM_THRESHOLD, _MOST_OF_INT)


def release_free_memory() -> None:
    """Gives memory that was freed back to the system, where the C library would keep it for the next tensors.

    Without that, tensors that fit into it are not seen in a peak that starts anew. What waits for the garbage collector
    is not freed yet.
    """
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except AttributeError:
            pass  # a C library other than glibc


def without_waiting(values: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A GPU copies it from pinned memory, in the order of its current stream."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def peak_memory_mb(device: torch.device) -> float:
    """Returns the largest memory of this rank since it began, or since `reset_peak_memory`.

    On a GPU that of tensors on `device`; on a CPU the resident memory of the process, libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return _resident("VmHWM:") / 1e6


def resident_memory_mb(device: torch.device) -> float:
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


class AllocationCounter:
    """Counts bytes of tensors on a device, while it is told to.

    On a CPU that is what torch takes, and the large arrays of compiled kernels; what another thread gives back is not
    seen (`let_others_go`). On a GPU it is what torch's allocator counts.

    Attributes:
        allocated: more than at the beginning. peak: the most, of those inside the last `counting`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.allocated = self.peak = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts within the block what is taken and given back. Not nested, nor used within a trace of torch.profiler.

        Python frees no circles meanwhile: what is in them may have been taken before, which torch warns of.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
            yield
            self.peak = self.allocated + torch.cuda.max_memory_allocated(self._device) - before
            self.allocated += torch.cuda.memory_allocated(self._device) - before
            return
        config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        frees_circles = gc.isenabled()
        gc.disable()
        _enable_profiler_legacy(config)
        _counting.append(self)
        try:
            yield
        finally:
            _counting.remove(self)
            events = _disable_profiler_legacy()
            if frees_circles:
                gc.enable()
        self.peak = self.allocated
        for event in chain.from_iterable(events):
            if event.kind() == "memory_alloc":
                self.allocated += event.cpu_memory_usage()
            elif event.name().startswith(_ARRAY):
                self.allocated += int(event.name().removeprefix(_ARRAY))
            self.peak = max(self.peak, self.allocated)


_counting: list[AllocationCounter] = []  # on a CPU


def let_others_go() -> None:
    """To be called when a collective is over: where memory is counted, its thread is to let its tensors go first, so
    that they are given back by this one."""
    if _counting:
        time.sleep(_LONG_ENOUGH)


def counted_array(array: np.ndarray) -> np.ndarray:
    """An array with memory of its own, which torch does not see, and the forecast of memory is to see."""
    if _counting:
        _mark(array.nbytes)
        weakref.finalize(array, _mark, -array.nbytes)
    return array


def _mark(size: int) -> None:
    """Among the events of torch, so that the order is known."""
    if _counting:
        with record_function(f"{_ARRAY}{size}"):
            pass
