"""Named stopwatches of the work of a device, and names of actions in the traces of torch.profiler."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.autograd import profiler

Mark = float | torch.cuda.Event


class Timers:
    """Times that a device takes for parts of a program, by name: ``with timers("forward"): ...``. No waiting.

    On a CPU a mark is the time; on a GPU it is an event among its work, which has a time when the GPU has come to it.
    Of parts that nobody asks for, the last ones are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timed: deque[tuple[str, Mark, Mark]] = deque(maxlen=10_000)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = self._mark()
        yield
        self._timed.append((name, started, self._mark()))

    def mean_ms(self) -> dict[str, float]:
        """Mean milliseconds of each part that was timed since the last call, as far as the device has ended it."""
        parts: dict[str, list[float]] = {}
        while self._timed and (isinstance(self._timed[0][2], float) or self._timed[0][2].query()):
            name, start, end = self._timed.popleft()
            if isinstance(start, float) or isinstance(end, float):
                milliseconds = 1e3 * (end - start)  # type: ignore[operator]
            else:
                milliseconds = start.elapsed_time(end)
            parts.setdefault(name, []).append(milliseconds)
        return {name: sum(each) / len(each) for name, each in parts.items()}

    def _mark(self) -> Mark:
        """A place behind all work of the device so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def named(name: object) -> AbstractContextManager[object]:
    """Names what runs inside, in a trace that is being taken; otherwise it costs nothing."""
    # torch.profiler, or `torch.autograd.profiler.emit_nvtx`, records this process
    return profiler.record_function(str(name)) if profiler._is_profiler_enabled else nullcontext()
