"""Named stopwatches, and a clock that goes with what a device has done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Mark = float | torch.cuda.Event


class Timers:
    """How long parts of a program take, by name: ``with timers("forward"): ...``.

    Args:
        synchronize: waits for the device before the clock is read, e.g. `torch.cuda.synchronize`; leave it None unless
            each part is to be timed exactly, because waiting takes away the overlap between host and device.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self._synchronize = synchronize
        self._seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = self._now()
        try:
            yield
        finally:
            self._seconds.setdefault(name, []).append(self._now() - started)

    def mean_ms(self) -> dict[str, float]:
        """Mean milliseconds of each part that was timed since the last call."""
        seconds, self._seconds = self._seconds, {}
        return {name: 1e3 * sum(each) / len(each) for name, each in seconds.items()}

    def _now(self) -> float:
        self._synchronize()
        return time.perf_counter()


class DeviceClock:
    """Tells when a device came to a place in its work. Marking a place waits for nothing.

    On a CPU a mark is the time; on a GPU it is an event among its work, which has a time when the GPU has come to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero: tuple[Mark, float] = 0.0, 0.0

    def start(self) -> None:
        """Sets the device's clock by that of the host. Waits for the device, so that nothing on it may wait for another
        rank."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._zero = self.mark(), time.perf_counter()

    def wait(self) -> None:
        """Until the device has done what it was given so far; not for receives that are posted, which it does beside
        that. An error of it is raised here at the latest."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def mark(self) -> Mark:
        """A place behind all work so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Mark) -> float:
        """When the device was there, in seconds of `time.perf_counter`; waits until it is."""
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        event, seconds = self._zero
        assert not isinstance(event, float), "the clock was not started"
        return seconds + event.elapsed_time(mark) / 1e3
