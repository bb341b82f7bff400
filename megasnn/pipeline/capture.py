"""Kernels that are taken down once and started again as a whole: a CUDA graph. Never run on a GPU so far."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch

Replay = Callable[[], None]


class Capture(Protocol):
    def make_room(self) -> None:
        """Before a step in which captures may be made. The device may be waited for."""

    def pool(self) -> Any:
        """A new pool of memory for captures; no two pools have memory in common."""

    def __call__(self, work: Callable[[], None], pool: Any) -> Replay:
        """Takes down what `work` starts on the device, without computing it. What is returned starts all of that again,
        on the same memory and with the same numbers; no line of Python runs then.

        Args:
            pool: gives the memory for what `work` makes. What `work` gives back, later captures in the pool use again,
                and may keep tensors in, which a replay of this one would overwrite: graphs of one pool are replayed in
                the order in which they were captured, be it not all of them, or keep nothing there.
        """

    def join(self) -> None:
        """What is started from now on comes after all that autograd has started: it goes backward where a forward was
        captured, also when it is not captured itself."""


class GraphOptions(NamedTuple):
    """
    Attributes:
        is_required: whether a layer that cannot have a graph is an error, and not only told.
    """

    capture: Capture
    is_required: bool


class CudaPool:
    """Memory for CUDA graphs, from one of torch's pools after the other.

    Attributes:
        handle: torch's name of the last one.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


class CudaCapture:
    """Makes CUDA graphs.

    The driver captures no default stream, so there is one for this. It waits for no other, and no other for it: what is
    captured runs where it is replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def make_room(self) -> None:
        """The allocator gives none of the memory that it has cached to a pool, and none of it back to the driver while
        anything is captured."""
        torch.cuda.empty_cache()

    def pool(self) -> CudaPool:
        return CudaPool()

    def __call__(self, work: Callable[[], None], pool: CudaPool) -> Replay:
        # Not by `torch.cuda.graph`, which waits for the device first: a message that it waits for may never come.
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # a graph that is freed meanwhile would make this one invalid
        try:
            with torch.cuda.stream(self._stream):
                # Other threads go on asking the driver: NCCL's, and those of autograd, which allocate.
                graph.capture_begin(pool.handle, capture_error_mode="thread_local")
                try:
                    work()
                except BaseException:
                    with suppress(RuntimeError):  # which says only that something went wrong before
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            self._clear_away(pool)
            raise
        finally:
            if collects:
                gc.enable()
        return graph.replay

    def join(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _clear_away(self, pool: CudaPool) -> None:
        """What torch 2.11 leaves of a capture that the driver has found invalid, so that others may be made.

        The allocators of the GPU's and of pinned memory take the pool for one that is being written to, and would
        refuse the next capture in it. That of the GPU's would besides keep what other streams have used for good, and
        fail where it looks for free memory (mended in 2.12). The generator of random numbers takes itself for one that
        is captured, and would refuse to be used.
        """
        device = self._stream.device_index
        with suppress(RuntimeError):  # where torch has ended it
            torch._C._cuda_endAllocateToPool(device, pool.handle)
            torch._C._cuda_releasePool(device, pool.handle)
        pool.renew()
        generator = torch.cuda.default_generators[device]
        with suppress(RuntimeError):
            generator.graphsafe_set_state(generator.clone_state())
