"""Frames are SpikingJelly's, count for count; and the camera that is simulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from megasnn.data.events import (
    Events,
    FrameOptions,
    Recording,
    SensorSize,
    SimulatedSensor,
    make_frames,
    resize_frames,
    simulate_recording,
)
from megasnn.data.events.frames import check_recording
from tests.data.events.files import equal, event_lists, random_events, spikingjelly_module

SENSOR = SensorSize(5, 7)


def frames_of(events: Events, options: FrameOptions, sensor: SensorSize = SENSOR) -> np.ndarray:
    return make_frames(Recording(events, sensor), options)


@settings(max_examples=160, deadline=None)
@given(event_lists(*SENSOR, longest_time=40), st.integers(1, 12), st.sampled_from(["number", "time"]))
def test_frames_are_spikingjellys(events, time_steps, split_by):
    options, integrate = FrameOptions(time_steps, split_by), spikingjelly_module("utils")
    if split_by == "time" and events.t[-1] - events.t[0] < time_steps:
        with pytest.raises(ValueError, match=f"{time_steps} frames?"):
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


QUIET = SimulatedSensor(noise_rate=0.0, mismatch=0.0)
RIGHT = ((-0.5, 0.0), (0.5, 0.0))
DIGITS = load_digits()
EDGE = np.zeros((26, 26))
EDGE[:, :13] = 1.0


def digit(index: int, *key, sensor: SimulatedSensor | None = None):
    return simulate_recording(DIGITS.images[index] / 16, "digit", index, *key, sensor=sensor)


def test_equal_keys_give_equal_recordings_which_look_like_n_mnist():
    """1 to 8 thousand events each, about half of each polarity, in order of time and inside the sensor."""
    forward = [digit(index) for index in (0, 1, 2)]
    backward = [digit(index) for index in (2, 1, 0)][::-1]
    assert all(equal(a.events, b.events) for a, b in zip(forward, backward, strict=True))
    assert not equal(digit(0).events, digit(0, "again").events)
    recordings = [digit(index) for index in range(30)]
    for recording in recordings:
        check_recording(recording)
        assert recording.sensor == (34, 34) and 1000 < len(recording.events) < 9000
        assert recording.events.t[0] >= 0 and recording.events.t[-1] <= 300_000
    assert 0.4 < np.mean([recording.events.p.mean() for recording in recordings]) < 0.6
    sensor = SimulatedSensor(SensorSize(48, 64), image_size=40, path=RIGHT, reach=12.0, duration=100_000)
    recording = check_recording(digit(5, sensor=sensor))
    assert recording.sensor == (48, 64) and recording.events.t[-1] > 95_000 and recording.events.x.max() >= 48


def test_an_event_outside_the_sensor_names_the_flag() -> None:
    events = Events(np.arange(2), np.array([6, 7], np.uint16), np.zeros(2, np.uint16), np.ones(2, np.uint8))
    with pytest.raises(ValueError, match=r"x = 7 at event 1 is outside the sensor of .*--sensor-size HEIGHT WIDTH"):
        check_recording(Recording(events, SENSOR))


@pytest.mark.parametrize(("path", "front", "back"), [(RIGHT, 1, 0), (RIGHT[::-1], 0, 1)])
def test_a_bright_bar_brightens_where_it_goes_and_darkens_where_it_was(path, front, back):
    bar = np.zeros((26, 26))
    bar[8:18, 10:16] = 1.0
    # Columns of the sensor: the bar covers 14..19, give or take the 3 pixels it moves to each side.
    events = simulate_recording(bar, "bar", sensor=replace(QUIET, path=path)).events
    right, left = events.x >= 18, events.x <= 14
    assert right.sum() > 200 and left.sum() > 200
    assert (events.p[right] == front).all() and (events.p[left] == back).all()
    assert events.y.min() >= 11 and events.y.max() <= 22


def test_events_are_the_contrast_in_thresholds_and_come_from_motion_and_noise_alone():
    for threshold in (0.1, 0.4):
        sensor = replace(QUIET, path=RIGHT, threshold=threshold)
        events = simulate_recording(EDGE, "edge", sensor=sensor).events
        per_pixel = len(events[(events.x == 17) & (events.y > 6) & (events.y < 27)]) / 20
        assert per_pixel == pytest.approx(np.log(1 / sensor.background) / threshold, abs=0.5)
    still = replace(QUIET, path=((0.0, 0.0), (0.0, 0.0)))
    assert len(digit(0, sensor=still).events) == 0
    noisy = digit(0, sensor=replace(still, noise_rate=5.0)).events
    assert len(noisy) == pytest.approx(5.0 * 0.3 * 34 * 34, rel=0.15)
