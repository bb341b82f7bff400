"""Memory and times as they are measured; pictures of samples and rasters."""

from __future__ import annotations

import gc
import mmap
import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch

from megasnn.common.memory import AllocationCounter, peak_memory_mb, reset_peak_memory
from megasnn.telemetry import timers as module
from megasnn.telemetry.pictures import raster_picture, to_rgb
from megasnn.telemetry.timers import Timers

CPU = torch.device("cpu")


def take(size: int) -> None:
    """Not an array: the C library may take it out of memory that others have freed, and keep it afterwards."""
    with mmap.mmap(-1, size) as block:
        block[::4096] = bytes(len(block[::4096]))


def test_a_peak_starts_anew() -> None:
    reset_peak_memory(CPU)
    before = peak_memory_mb(CPU)
    take(100_000_000)
    assert 80 < peak_memory_mb(CPU) - before < 150, "of memory that is already given back"
    reset_peak_memory(CPU)
    assert peak_memory_mb(CPU) < before + 50


class _Circle:
    def __init__(self) -> None:
        self.itself, self.tensor = self, torch.zeros(1000)


def test_bytes_of_tensors_are_counted_and_circles_from_before_stay() -> None:
    """The program's own collector would free them at any moment, and torch warn of memory that it does not know."""
    alive, counter = weakref.ref(_Circle()), AllocationCounter(CPU)
    with counter.counting():
        first = torch.zeros(1000)
        torch.zeros(500)
        lists = [[number] for number in range(100_000)]
        assert alive() is not None
    assert (counter.allocated, counter.peak) == (4000, 6000)
    with counter.counting():
        del first
    assert (counter.allocated, counter.peak) == (0, 4000)
    gc.collect()
    assert alive() is None and gc.isenabled() and len(lists) == 100_000


class _Event:
    """Event of a device, which has passed it at `passed` milliseconds; None before that."""

    recorded: ClassVar[list[_Event]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.passed: float | None = None

    def record(self) -> None:
        self.recorded.append(self)

    def query(self) -> bool:
        return self.passed is not None

    def elapsed_time(self, end: _Event) -> float:
        assert self.passed is not None and end.passed is not None, "this would wait"
        return end.passed - self.passed


def test_means_of_an_interval_and_a_device_by_its_own_clock_that_is_never_waited_for(monkeypatch):
    timers, clock = Timers(torch.device("cpu")), iter((0.0, 1.0, 1.0, 4.0, 4.0))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    for _ in range(2):
        with timers("forward"):
            pass
    with pytest.raises(KeyError), timers("step"):
        raise KeyError
    assert timers.mean_ms() == {"forward": 2000.0} and timers.mean_ms() == {}

    monkeypatch.setattr(module.torch.cuda, "Event", _Event)
    timers = Timers(torch.device("cuda"))
    events = _Event.recorded
    for _ in range(2):
        with timers("step"):
            pass
    assert timers.mean_ms() == {}
    for event, when in zip(events[:3], (1.0, 4.0, 5.0), strict=True):
        event.passed = when
    assert timers.mean_ms() == {"step": 3.0}
    events[3].passed = 12.0
    assert timers.mean_ms() == {"step": 7.0}


WHITE, RED, BLUE, BLACK = (255, 255, 255), (255, 0, 0), (0, 0, 255), (0, 0, 0)


def test_polarities_have_their_colours_and_frames_stand_side_by_side() -> None:
    frames = np.zeros((3, 2, 4, 5), np.uint8)
    frames[0, 1, 0, 1] = frames[1, 0, 2, 3] = 7
    frames[2, :, 3, 4] = 7
    picture = to_rgb(frames)
    assert picture.shape == (4, 3 * 6, 3) and picture.dtype == np.uint8
    assert tuple(picture[0, 1]) == RED and tuple(picture[2, 6 + 3]) == BLUE and tuple(picture[3, 12 + 4]) == BLACK
    assert (picture == WHITE).all(-1).sum() == 3 * 20 - 3


def test_a_raster_has_a_row_for_each_neuron_and_a_column_for_each_step() -> None:
    raster = np.zeros((2, 3, 4), bool)
    raster[1, 2, 0] = True  # the second sample's third neuron at the first step
    picture = raster_picture(raster)
    assert picture.shape == (3, 9, 3) and np.argwhere(picture[..., 0] == 0).tolist() == [[2, 5]]
    assert set(np.unique(picture[:, 4])) == {160}
