from __future__ import annotations

import pytest
import torch

from megasnn.telemetry import timers as module
from megasnn.telemetry.timers import Timers


class _Event:
    """Of a device: `passed` is when it came there in milliseconds, None before."""

    def __init__(self) -> None:
        self.passed: float | None = None

    def query(self) -> bool:
        return self.passed is not None

    def elapsed_time(self, end: _Event) -> float:
        assert self.passed is not None and end.passed is not None, "this would wait"
        return end.passed - self.passed


def test_means_of_an_interval_and_a_device_by_its_own_clock_that_is_never_waited_for(monkeypatch):
    events: list[_Event] = []

    def mark(_: Timers) -> _Event:
        events.append(_Event())
        return events[-1]

    timers, clock = Timers(torch.device("cpu")), iter((0.0, 1.0, 1.0, 4.0, 4.0))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    for _ in range(2):
        with timers("forward"):
            pass
    with pytest.raises(KeyError), timers("step"):
        raise KeyError
    assert timers.mean_ms() == {"forward": 2000.0} and timers.mean_ms() == {}

    monkeypatch.setattr(module.torch.cuda, "Event", _Event)
    monkeypatch.setattr(Timers, "_mark", mark)
    for _ in range(2):
        with timers("step"):
            pass
    assert timers.mean_ms() == {}
    for event, when in zip(events[:3], (1.0, 4.0, 5.0), strict=True):
        event.passed = when
    assert timers.mean_ms() == {"step": 3.0}
    events[3].passed = 12.0
    assert timers.mean_ms() == {"step": 7.0}
