"""Captures of GPU work as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from megasnn.parallel.traffic import traffic

Result = TypeVar("Result")


class Capture(Protocol):
    """Maker of graphs in memory pools.

    A later capture may reuse memory freed by an earlier one in the same pool. So graphs in one pool are replayed in
    capture order, or keep no tensors there.
    """

    def pool(self) -> Any: ...

    def __call__(self, work: Callable[[], None], pool: Any) -> Callable[[], None]:
        """Captures the kernels without running them. Returns a function that runs them."""


class CudaCapture:
    """Captures on its own stream: the driver cannot capture the default stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def pool(self) -> Any:
        # The allocator's cache is not available to a pool.
        torch.cuda.empty_cache()
        return torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None], pool: Any) -> Callable[[], None]:
        # `torch.cuda.graph` would first wait for the device, which may wait for a message that never comes.
        graph = torch.cuda.CUDAGraph()
        was_enabled = gc.isenabled()
        # A graph that is freed during a capture would invalidate the capture.
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                # Other threads (NCCL's, autograd's allocations) go on calling the driver.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                work()
                graph.capture_end()
        finally:
            if was_enabled:
                gc.enable()
        return graph.replay


def captured(
    capture: Capture, work: Callable[[], Result], pool: Any, work_name: str
) -> tuple[Result, Callable[[], None]]:
    """Returns the work's result, and its replay.

    Raises RuntimeError with the work's name and the reason.
    """
    # `Capture` returns the replay alone, so the result leaves the work here.
    results: list[Result] = []
    try:
        with traffic.separate() as moved:
            replay = capture(lambda: results.append(work()), pool)
    except Exception as error:
        # The first line only: torch appends advice about CUDA errors in general.
        lines = str(error).splitlines() or [""]
        kind = type(error).__name__
        raise RuntimeError(f"{work_name} cannot be captured ({kind}: {lines[0]}); use --cuda-graphs off") from error

    def replay_with_traffic() -> None:
        replay()
        traffic.add(moved)

    (result,) = results
    return result, replay_with_traffic if moved else replay
