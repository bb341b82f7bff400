"""Named stopwatches that go with what a device has done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = float | torch.cuda.Event


class Timers:
    """Times that a device takes for parts of a program, by name: ``with timers("forward"): ...``. No waiting.

    On a CPU a mark is the time; on a GPU it is an event among its work, which has a time when the GPU has come to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: deque[tuple[str, Mark, Mark]] = deque()  # the device may not have come to their ends
        self._seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = self._mark()
        yield
        self._open.append((name, started, self._mark()))
        self._take_ended()

    def mean_ms(self) -> dict[str, float]:
        """Mean milliseconds of each part that was timed since the last call, as far as the device has ended it."""
        self._take_ended()
        seconds, self._seconds = self._seconds, {}
        return {name: 1e3 * sum(each) / len(each) for name, each in seconds.items()}

    def _take_ended(self) -> None:
        while self._open and (isinstance(self._open[0][2], float) or self._open[0][2].query()):
            name, start, end = self._open.popleft()
            if isinstance(start, float) or isinstance(end, float):
                seconds = end - start  # type: ignore[operator]
            else:
                seconds = start.elapsed_time(end) / 1e3
            self._seconds.setdefault(name, []).append(seconds)

    def _mark(self) -> Mark:
        """A place behind all work of the device so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
