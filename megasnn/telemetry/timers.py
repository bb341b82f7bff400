"""Device timers, and named ranges for torch.profiler traces."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.autograd import profiler

EventPair = tuple[torch.cuda.Event, torch.cuda.Event]


class Timers:
    """Device time by name: ``with timers("forward"): ...``. Never waits for the device.

    A GPU part has a time once the GPU has passed its end. The last 10,000 parts are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._parts: deque[tuple[str, float | EventPair]] = deque(maxlen=10_000)  # milliseconds on a CPU

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if not self._is_cuda:
            began = time.perf_counter()
            yield
            self._parts.append((name, 1e3 * (time.perf_counter() - began)))
            return
        # Events are marks among the device's work: a clock on the host would only measure the launches.
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._parts.append((name, (begin, end)))

    def mean_ms(self) -> dict[str, float]:
        """Mean milliseconds by part that ended since the last call."""
        return {name: sum(each) / len(each) for name, each in self.ended_ms().items()}

    def ended_ms(self) -> dict[str, list[float]]:
        """Milliseconds of every part that ended since the last call, by name."""
        times: dict[str, list[float]] = {}
        while self._parts:
            name, part = self._parts[0]
            if isinstance(part, float):
                milliseconds = part
            else:
                begin, end = part
                # Events pass in the order of their stream: later parts have not ended either.
                if not end.query():
                    break
                milliseconds = begin.elapsed_time(end)
            self._parts.popleft()
            times.setdefault(name, []).append(milliseconds)
        return times


def is_traced() -> bool:
    """True while torch.profiler or torch.autograd.profiler.emit_nvtx records this process."""
    return profiler._is_profiler_enabled


def named(name: object) -> AbstractContextManager[object]:
    """Names a range in a trace; without a recording it costs little."""
    return profiler.record_function(str(name)) if is_traced() else nullcontext()
