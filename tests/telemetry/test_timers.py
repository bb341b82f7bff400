from __future__ import annotations

import pytest

from megasnn.telemetry import timers as module
from megasnn.telemetry.timers import Timers


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves by hand: ``clock[0]`` is the time in seconds."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_mean_over_an_interval_then_a_new_interval(clock):
    timers = Timers()
    for seconds in (1.0, 3.0):
        with timers("forward"):
            clock[0] += seconds
    clock[0] += 100.0
    assert timers.mean_ms() == {"forward": 2000.0}
    assert timers.mean_ms() == {}


def test_what_an_exception_ends_is_timed(clock):
    timers = Timers()
    with pytest.raises(KeyError), timers("step"):
        clock[0] = 1.0
        raise KeyError
    assert timers.mean_ms() == {"step": 1000.0}


def test_the_device_is_waited_for_only_when_asked(clock):
    def wait() -> None:
        clock[0] += 0.5

    timers = Timers(synchronize=wait)
    with timers("step"):
        clock[0] += 1.0
    assert timers.mean_ms() == {"step": 1500.0}
