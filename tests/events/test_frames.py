"""Frames are SpikingJelly's, count for count; scaling is PyTorch's antialiased bilinear one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.events import Events, FrameOptions, Recording, SensorSize, make_frames, resize_frames
from tests.events.files import event_lists, random_events, spikingjelly_module

SENSOR = SensorSize(5, 7)


def frames_of(events: Events, options: FrameOptions, sensor: SensorSize = SENSOR) -> np.ndarray:
    return make_frames(Recording(events, sensor), options)


@settings(max_examples=160, deadline=None)
@given(event_lists(*SENSOR, longest_time=40), st.integers(1, 12), st.sampled_from(["number", "time"]))
def test_frames_are_spikingjellys(events, time_steps, split_by):
    options, integrate = FrameOptions(time_steps, split_by), spikingjelly_module("utils")
    if split_by == "time" and events.t[-1] - events.t[0] < time_steps:
        with pytest.raises(ValueError, match=f"{time_steps} frames"):
            frames_of(events, options)
        return
    frames = frames_of(events, options)
    assert frames.dtype == np.int32 and frames.shape == (time_steps, 2, *SENSOR) and frames.sum() == len(events)
    arrays = {name: getattr(events, name) for name in "txyp"}
    try:
        theirs = integrate.integrate_events_by_fixed_frames_number(arrays, split_by, time_steps, *SENSOR)
    except IndexError:  # there, a time without events is an error; here, an empty frame
        edges = events.t[0] + (events.t[-1] - events.t[0]) // time_steps * np.arange(time_steps + 1)
        assert split_by == "time" and (np.diff(np.searchsorted(events.t, edges)) == 0).any()
        return
    assert np.array_equal(frames, theirs)


@pytest.mark.parametrize(("old", "new"), [((128, 128), 48), ((34, 34), 48), ((100, 60), 48), ((8, 8), 1)])
def test_resizing_is_pytorchs(old, new):
    frames = np.random.default_rng(0).poisson(2.0, (3, 2, *old)).astype(np.int32)
    theirs = F.interpolate(
        torch.from_numpy(frames).double(), size=(new, new), mode="bilinear", antialias=True, align_corners=False
    )
    ours = resize_frames(frames, new)
    assert ours.shape == (3, 2, new, new) and ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-5)


def test_frames_of_the_sensors_size_stay_counts_and_options_are_checked():
    events = random_events(3000, 16, 16)
    assert frames_of(events, FrameOptions(4, size=16), SensorSize(16, 16)).dtype == np.int32
    for options, named in (({"time_steps": 0}, "--time-steps.* 0"), ({"split_by": "count"}, "--split-by.*'count'")):
        with pytest.raises(ValueError, match=named):
            FrameOptions(**options)
    for large in (FrameOptions(10**9), FrameOptions(1, size=10**5)):
        with pytest.raises(ValueError, match="--max-sample-mb"):
            frames_of(Events.make([0, 10**9], [0, 0], [0, 0], [0, 0]), large)
