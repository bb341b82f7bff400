"""Kernels that are taken down once and started again as a whole: a CUDA graph. Never run on a GPU so far."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch

Replay = Callable[[], None]


class Capture(Protocol):
    def __call__(self, work: Callable[[], None]) -> Replay:
        """Takes down what `work` starts on the device, without computing it. What is returned starts all of that again,
        on the same memory and with the same numbers; no line of Python runs then.

        No two captures have memory in common, also not what `work` uses and gives back: a later capture would keep
        tensors there, which a replay of this one would overwrite. So the order of replays is free, as long as none runs
        beside another.
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


class CudaCapture:
    """Makes CUDA graphs, each with a pool of memory of its own.

    The driver captures no default stream, so there is one for this. It waits for no other, and no other for it: what is
    captured runs where it is replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Callable[[], None]) -> Replay:
        # Not by `torch.cuda.graph`, which waits for the device first: a message that it waits for may never come.
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        collects = gc.isenabled()
        gc.disable()  # a graph that is freed meanwhile would make this one invalid
        try:
            with torch.cuda.stream(self._stream):
                # Other threads go on asking the driver: NCCL's, and those of autograd, which allocate.
                graph.capture_begin(pool, capture_error_mode="thread_local")
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

    def _clear_away(self, pool: tuple[int, int]) -> None:
        """What torch 2.11 leaves of a capture that the driver has found invalid, so that others may be made.

        The allocator takes the pool for one that is being written to: it would refuse the next capture in it, keep
        what other streams have used for good, and fail where it looks for free memory (mended in 2.12). The generator
        of random numbers takes itself for one that is captured, and would refuse to be used.
        """
        device = self._stream.device_index
        with suppress(RuntimeError):  # where torch has ended it
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        generator = torch.cuda.default_generators[device]
        with suppress(RuntimeError):
            generator.graphsafe_set_state(generator.clone_state())
