"""Named stopwatches, and a clock that goes with what a device has done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = float | torch.cuda.Event


class Timers:
    """Times that a device takes for parts of a program, by name: ``with timers("forward"): ...``. No waiting."""

    def __init__(self, device: torch.device) -> None:
        self._clock = DeviceClock(device)
        self._open: deque[tuple[str, Mark, Mark]] = deque()  # the device may not have come to their ends
        self._seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = self._clock.mark()
        yield
        self._open.append((name, started, self._clock.mark()))
        self._take_ended()

    def mean_ms(self) -> dict[str, float]:
        """Mean milliseconds of each part that was timed since the last call, as far as the device has ended it."""
        self._take_ended()
        seconds, self._seconds = self._seconds, {}
        return {name: 1e3 * sum(each) / len(each) for name, each in seconds.items()}

    def _take_ended(self) -> None:
        while self._open and self._clock.has_passed(self._open[0][2]):
            name, start, end = self._open.popleft()
            self._seconds.setdefault(name, []).append(self._clock.between(start, end))


class DeviceClock:
    """Tells when a device came to a place in its work. Marking a place waits for nothing.

    On a CPU a mark is the time; on a GPU it is an event among its work, which has a time when the GPU has come to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        """A place behind all work so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: Mark) -> bool:
        """True where the device has come to a place; nothing waits for it."""
        return isinstance(mark, float) or mark.query()

    def between(self, start: Mark, end: Mark) -> float:
        """Seconds of the device from one place to another; it has passed both."""
        if isinstance(start, float) and isinstance(end, float):
            return end - start
        assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event), "marks of two clocks"
        return start.elapsed_time(end) / 1e3
