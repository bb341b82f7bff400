"""Named stopwatches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
