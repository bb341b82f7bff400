"""Memory of tensors, counted where it is taken and given back: exact, and the same in every run."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch.profiler import record_function

_ARRAY = "bytes of arrays:"


class AllocationCounter:
    """Counts bytes of tensors on a device, while it is told to.

    On a CPU that is what torch takes, and the large arrays of compiled kernels; what another thread gives back is not
    seen (`let_others_go`). On a GPU it is what torch's allocator counts.

    Attributes:
        held: more than at the beginning. peak: the most, of those inside the last `counting`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.held = self.peak = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts within the block what is taken and given back. Not nested, nor used within a trace of torch.profiler.

        Python frees no circles meanwhile: what is in them may have been taken before, which torch warns of.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
            yield
            self.peak = self.held + torch.cuda.max_memory_allocated(self._device) - before
            self.held += torch.cuda.memory_allocated(self._device) - before
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
        self.peak = self.held
        for event in chain.from_iterable(events):
            if event.kind() == "memory_alloc":
                self.held += event.cpu_memory_usage()
            elif event.name().startswith(_ARRAY):
                self.held += int(event.name().removeprefix(_ARRAY))
            self.peak = max(self.peak, self.held)


_counting: list[AllocationCounter] = []  # on a CPU
_LONG_ENOUGH = 1e-3  # seconds


def let_others_go() -> None:
    """To be called when a collective is over: where memory is counted, its thread is to let its tensors go first, so
    that they are given back by this one."""
    if _counting:
        time.sleep(_LONG_ENOUGH)


def counted(array: np.ndarray) -> np.ndarray:
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
