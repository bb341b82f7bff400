"""Frames are SpikingJelly's, count for count; scaling is PyTorch's antialiased bilinear one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.events import (
    Events,
    FrameOptions,
    SensorSize,
    events_to_frames,
    frame_starts,
    normalize_frames,
    resize_frames,
)
from tests.events.files import event_lists, random_events
from tests.events.spikingjelly_events import utils

SENSOR = SensorSize(5, 7)
quick = settings(max_examples=150, deadline=None)


def as_dict(events: Events) -> dict[str, np.ndarray]:
    return {"t": events.t, "x": events.x, "y": events.y, "p": events.p}


@quick
@given(event_lists(*SENSOR, longest_time=40), st.integers(1, 12))
def test_equal_numbers_of_events(events, time_steps):
    frames = events_to_frames(events, SENSOR, FrameOptions(time_steps, "number"))
    theirs = utils().integrate_events_by_fixed_frames_number(as_dict(events), "number", time_steps, *SENSOR)
    assert frames.dtype == np.int32 and frames.shape == (time_steps, 2, *SENSOR)
    assert np.array_equal(frames, theirs)


@quick
@given(event_lists(*SENSOR, longest_time=40), st.integers(1, 12))
def test_equal_times(events, time_steps):
    options = FrameOptions(time_steps, "time")
    if events.t[-1] - events.t[0] < time_steps:
        with pytest.raises(ValueError, match=f"too short for {time_steps} frames"):
            events_to_frames(events, SENSOR, options)
        return
    frames = events_to_frames(events, SENSOR, options)
    assert frames.sum() == len(events)
    starts = frame_starts(events.t, options)
    try:
        left, right = utils().cal_fixed_frames_number_segment_index(events.t, "time", time_steps)
    except IndexError:  # there, a time without events is an error; here, an empty frame
        edges = events.t[0] + (events.t[-1] - events.t[0]) // time_steps * np.arange(time_steps + 1)
        assert (np.diff(np.searchsorted(events.t, edges)) == 0).any()
        return
    assert np.array_equal(starts, [*left, right[-1]])
    theirs = utils().integrate_events_by_fixed_frames_number(as_dict(events), "time", time_steps, *SENSOR)
    assert np.array_equal(frames, theirs)


@quick
@given(event_lists(*SENSOR, longest_time=40), st.integers(1, 50))
def test_equal_durations(events, duration):
    frames = events_to_frames(events, SENSOR, FrameOptions(time_steps=None, duration=duration))
    if events.t[0] == events.t[-1]:
        assert frames.shape[0] == 1 and frames.sum() == len(events)  # an IndexError there
        return
    assert np.array_equal(frames, utils().integrate_events_by_fixed_duration(as_dict(events), duration, *SENSOR))


def test_every_count_lies_where_its_event_was():
    events = Events.make([0, 1, 2, 3], [6, 6, 0, 2], [4, 4, 1, 3], [1, 1, 0, 1])
    frames = events_to_frames(events, SENSOR, FrameOptions(2))
    expected = np.zeros((2, 2, 5, 7), int)
    expected[0, 1, 4, 6] = 2
    expected[1, 0, 1, 0] = 1
    expected[1, 1, 3, 2] = 1
    assert np.array_equal(frames, expected)


@pytest.mark.parametrize(("old", "new"), [((128, 128), 48), ((34, 34), 48), ((100, 60), 48), ((7, 5), 5), ((8, 8), 1)])
def test_resizing_is_pytorchs(old, new):
    frames = np.random.default_rng(0).poisson(2.0, (3, 2, *old)).astype(np.int32)
    theirs = F.interpolate(
        torch.from_numpy(frames).double(), size=(new, new), mode="bilinear", antialias=True, align_corners=False
    )
    ours = resize_frames(frames, new)
    assert ours.shape == (3, 2, new, new) and ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-5)


def test_normalisation_comes_before_scaling():
    events = random_events(3000, 16, 16)
    sensor = SensorSize(16, 16)
    counts = events_to_frames(events, sensor, FrameOptions(4))
    normalized = normalize_frames(counts)
    assert normalized.max(axis=(1, 2, 3)) == pytest.approx([1, 1, 1, 1])
    both = events_to_frames(events, sensor, FrameOptions(4, size=6, normalize="frame-max"))
    assert np.array_equal(both, resize_frames(normalized, 6))
    np.testing.assert_array_equal(normalize_frames(np.zeros((2, 2, 3, 3), np.int32)), 0)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"time_steps": 4, "duration": 10}, "time_steps 4, duration 10 us"),
        ({"time_steps": None}, "time_steps None, duration None us"),
        ({"time_steps": 0}, "time_steps must be at least 1, got 0"),
        ({"time_steps": None, "duration": -5}, "duration must be at least 1, got -5"),
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"split_by": "count"}, "split_by must be one of number, time, got 'count'"),
        ({"normalize": "max"}, "normalize must be one of none, frame-max, got 'max'"),
    ],
)
def test_options_that_make_no_sense(options, problem):
    with pytest.raises(ValueError, match=problem):
        FrameOptions(**options)


def test_events_that_cannot_be_counted():
    events = random_events(10, 5, 7)
    with pytest.raises(ValueError, match="at least one event"):
        events_to_frames(events[:0], SENSOR, FrameOptions())
    with pytest.raises(ValueError, match="outside the sensor of 5 x 6"):
        events_to_frames(Events.make([0, 1], [6, 0], [4, 0], [0, 0]), SensorSize(5, 6), FrameOptions(1))
    with pytest.raises(ValueError, match="time runs backwards"):
        events_to_frames(Events.make([1, 0], [0, 0], [0, 0], [0, 0]), SENSOR, FrameOptions(1))
