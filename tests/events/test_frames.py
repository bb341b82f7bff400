"""Frames are SpikingJelly's, count for count; scaling is PyTorch's antialiased bilinear one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.events import Events, FrameOptions, Recording, SensorSize, make_frames, resize_frames
from tests.events.files import event_lists, random_events
from tests.events.spikingjelly_events import utils

SENSOR = SensorSize(5, 7)
quick = settings(max_examples=80, deadline=None)


def frames_of(events: Events, options: FrameOptions, sensor: SensorSize = SENSOR) -> np.ndarray:
    return make_frames(Recording(events, sensor), options)


def as_dict(events: Events) -> dict[str, np.ndarray]:
    return {"t": events.t, "x": events.x, "y": events.y, "p": events.p}


@quick
@given(event_lists(*SENSOR, longest_time=40), st.integers(1, 12))
def test_equal_numbers_of_events(events, time_steps):
    frames = frames_of(events, FrameOptions(time_steps, "number"))
    theirs = utils().integrate_events_by_fixed_frames_number(as_dict(events), "number", time_steps, *SENSOR)
    assert frames.dtype == np.int32 and frames.shape == (time_steps, 2, *SENSOR)
    assert np.array_equal(frames, theirs)


@quick
@given(event_lists(*SENSOR, longest_time=40), st.integers(1, 12))
def test_equal_times(events, time_steps):
    options = FrameOptions(time_steps, "time")
    if events.t[-1] - events.t[0] < time_steps:
        with pytest.raises(ValueError, match=f"{time_steps} frames"):
            frames_of(events, options)
        return
    frames = frames_of(events, options)
    assert frames.sum() == len(events)
    try:
        theirs = utils().integrate_events_by_fixed_frames_number(as_dict(events), "time", time_steps, *SENSOR)
    except IndexError:  # there, a time without events is an error; here, an empty frame
        edges = events.t[0] + (events.t[-1] - events.t[0]) // time_steps * np.arange(time_steps + 1)
        assert (np.diff(np.searchsorted(events.t, edges)) == 0).any()
        return
    assert np.array_equal(frames, theirs)


@quick
@given(event_lists(*SENSOR, longest_time=40), st.integers(1, 50))
def test_equal_durations(events, duration):
    if events.t[0] == events.t[-1] or (events.t[-1] - events.t[0]) % duration == 0:
        return  # there an IndexError, or the last event one frame earlier
    theirs = utils().integrate_events_by_fixed_duration(as_dict(events), duration, *SENSOR)
    assert np.array_equal(frames_of(events, FrameOptions(len(theirs), frame_duration=duration)), theirs)


@quick
@given(event_lists(*SENSOR, longest_time=40), st.integers(1, 30), st.integers(1, 8))
def test_a_number_of_frames_of_a_duration(events, duration, time_steps):
    """What comes after them is left out, what is missing is empty."""
    frames = frames_of(events, FrameOptions(time_steps, frame_duration=duration))
    assert frames.shape == (time_steps, 2, *SENSOR)
    number = (events.t - events.t[0]) // duration
    assert frames.sum(axis=(1, 2, 3)).tolist() == [(number == frame).sum() for frame in range(time_steps)]


@pytest.mark.parametrize(("old", "new"), [((128, 128), 48), ((34, 34), 48), ((100, 60), 48), ((8, 8), 1)])
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
    counts = frames_of(events, FrameOptions(4), sensor)
    normalized = frames_of(events, FrameOptions(4, normalize="frame-max"), sensor)
    np.testing.assert_allclose(normalized, counts / counts.max(axis=(1, 2, 3), keepdims=True), rtol=1e-6)
    both = frames_of(events, FrameOptions(4, size=6, normalize="frame-max"), sensor)
    assert np.array_equal(both, resize_frames(normalized, 6))
    assert frames_of(events, FrameOptions(4, size=16), sensor).dtype == np.int32, "not scaled, still counts"
    empty = frames_of(events[:1], FrameOptions(3, frame_duration=9, normalize="frame-max"), sensor)
    assert empty.sum() == 1 and np.isfinite(empty).all()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"time_steps": 0}, "--time-steps.* 0"),
        ({"split_by": "count"}, "--split-by.*'count'"),
        ({"normalize": "max"}, "--normalize-frames.*'max'"),
        ({"split_by": "time", "frame_duration": 9}, "--split-by.*--frame-duration 9"),
    ],
)
def test_options_that_make_no_sense(options, named):
    with pytest.raises(ValueError, match=named):
        FrameOptions(**options)


def test_frames_that_would_be_too_large():
    events = Events.make([0, 10**9], [0, 0], [0, 0], [0, 0])
    for options in (FrameOptions(10**9), FrameOptions(10**9, frame_duration=1), FrameOptions(1, size=10**5)):
        with pytest.raises(ValueError, match="--max-sample-mb"):
            frames_of(events, options)
