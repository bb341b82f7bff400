"""The simulated camera: an edge makes the events that a real one would, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.datasets import load_digits

from megasnn.events import SensorSize, SimulatedSensor, simulate_recording
from megasnn.events.recording import check_recording
from tests.events.files import equal

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
