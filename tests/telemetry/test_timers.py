from __future__ import annotations

import pytest
import torch

from megasnn.telemetry import timers as module
from megasnn.telemetry.timers import DeviceClock, Timers


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves by hand: ``clock[0]`` is the time in seconds."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_mean_over_an_interval_then_a_new_interval(clock):
    timers = Timers(torch.device("cpu"))
    for seconds in (1.0, 3.0):
        with timers("forward"):
            clock[0] += seconds
    with pytest.raises(KeyError), timers("step"):
        clock[0] += 1.0
        raise KeyError
    clock[0] += 100.0
    assert timers.mean_ms() == {"forward": 2000.0}
    assert timers.mean_ms() == {}


class _Event:
    """Of a device: `passed` is when it came there in milliseconds, None before."""

    def __init__(self) -> None:
        self.passed: float | None = None

    def query(self) -> bool:
        return self.passed is not None

    def elapsed_time(self, end: _Event) -> float:
        assert self.passed is not None and end.passed is not None, "this would wait"
        return end.passed - self.passed


def test_a_device_is_timed_by_its_own_clock_and_never_waited_for(monkeypatch):
    events: list[_Event] = []

    def mark(_: DeviceClock) -> _Event:
        events.append(_Event())
        return events[-1]

    monkeypatch.setattr(module.torch.cuda, "Event", _Event)
    monkeypatch.setattr(DeviceClock, "mark", mark)
    timers = Timers(torch.device("cpu"))
    for _ in range(2):
        with timers("step"):
            pass
    assert timers.mean_ms() == {}
    for event, when in zip(events[:3], (1.0, 4.0, 5.0), strict=True):
        event.passed = when
    assert timers.mean_ms() == {"step": 3.0}
    events[3].passed = 12.0
    assert timers.mean_ms() == {"step": 7.0}
