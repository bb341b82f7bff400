from __future__ import annotations

from unittest import mock

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


def test_a_gpu_is_waited_for_without_its_posted_receives():
    """They are in streams of their own: to wait for the whole device would be to wait for another rank."""
    with mock.patch("torch.cuda.current_stream") as stream, mock.patch("torch.cuda.synchronize") as device:
        DeviceClock(torch.device("cpu")).wait()
        assert not stream.called
        DeviceClock(torch.device("cuda", 0)).wait()
    stream.return_value.synchronize.assert_called_once_with()
    assert not device.called
