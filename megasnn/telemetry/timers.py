"""Named stopwatches."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType


class Timer:
    """Adds up the seconds between `start` and `stop`; also usable in a `with` statement.

    Args:
        synchronize: called before the clock is read, for devices that lag behind the host; None: no waiting.
    """

    def __init__(self, name: str, synchronize: Callable[[], None] | None = None) -> None:
        self.name = name
        self.seconds = 0.0
        self.count = 0
        self._synchronize = synchronize
        self._started: float | None = None

    def start(self) -> None:
        """Raises RuntimeError when the timer already runs."""
        if self._started is not None:
            raise RuntimeError(f"timer '{self.name}' is started twice without a stop")
        self._started = self._now()

    def stop(self) -> None:
        """Raises RuntimeError when the timer does not run."""
        if self._started is None:
            raise RuntimeError(f"timer '{self.name}' is stopped without a start")
        self.seconds += self._now() - self._started
        self.count += 1
        self._started = None

    def reset(self) -> None:
        """Forgets what was measured; a running measurement begins anew."""
        self.seconds, self.count = 0.0, 0
        if self._started is not None:
            self._started = self._now()

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Timers:
    """Timers by name, made on first use: ``with timers("forward"): ...``.

    Args:
        synchronize: waits for the device, e.g. `torch.cuda.synchronize`; leave it None unless each part is to
            be timed exactly, because waiting takes away the overlap between host and device.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        if name not in self._timers:
            self._timers[name] = Timer(name, self._synchronize)
        return self._timers[name]

    def mean_ms(self, reset: bool = True) -> dict[str, float]:
        """Mean milliseconds per start and stop of each timer in use; `reset` begins the next interval."""
        used = {name: timer for name, timer in self._timers.items() if timer.count}
        means = {name: 1e3 * timer.seconds / timer.count for name, timer in used.items()}
        if reset:
            for timer in self._timers.values():
                timer.reset()
        return means
