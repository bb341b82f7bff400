"""The simulated camera: an edge makes the events that a real one would, and nothing else does."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from sklearn.datasets import load_digits

from megasnn.events import (
    CLOSED_LOOP,
    FrameOptions,
    SensorSize,
    SimulatedSensor,
    make_frames,
    simulate_recording,
)
from megasnn.events.recording import check_recording
from tests.events.files import equal

QUIET = SimulatedSensor(noise_rate=0.0, mismatch=0.0)
RIGHT = ((-0.5, 0.0), (0.5, 0.0))
DIGITS = load_digits()


def digit(index: int, *key, sensor: SimulatedSensor | None = None):
    return simulate_recording(DIGITS.images[index] / 16, "digit", index, *key, sensor=sensor)


def test_equal_keys_give_equal_recordings_in_any_order():
    forward = [digit(index) for index in (0, 1, 2)]
    backward = [digit(index) for index in (2, 1, 0)][::-1]
    assert all(equal(a.events, b.events) for a, b in zip(forward, backward, strict=True))
    assert not equal(digit(0).events, digit(0, "again").events)
    assert not equal(digit(0).events, digit(0, sensor=SimulatedSensor(seed=1)).events)


def test_a_recording_is_what_a_reader_would_give():
    recording = digit(3)
    check_recording(recording, "simulated")
    assert recording.sensor == (34, 34)
    assert recording.events.t[0] >= 0 and recording.events.t[-1] <= 300_000
    assert set(np.unique(recording.events.p)) == {0, 1}
    frames = make_frames(recording, FrameOptions(10))
    assert frames.shape == (10, 2, 34, 34)


def test_nothing_moves_nothing_happens():
    still = replace(QUIET, path=((0.0, 0.0), (0.0, 0.0)))
    assert len(digit(0, sensor=still).events) == 0
    assert len(simulate_recording(np.full((8, 8), 0.0), "dark", sensor=QUIET).events) == 0
    noisy = replace(still, noise_rate=5.0)
    expected = 5.0 * 0.3 * 34 * 34
    assert len(digit(0, sensor=noisy).events) == pytest.approx(expected, rel=0.15)


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
    moved = [events.t[(events.x == column) & (events.p == front)].mean() for column in (18, 20)]
    assert (moved[0] < moved[1]) == (path == RIGHT)


def test_the_number_of_events_is_the_contrast_in_thresholds():
    bar = np.zeros((26, 26))
    bar[:, :13] = 1.0
    for threshold in (0.1, 0.2, 0.4):
        sensor = replace(QUIET, path=RIGHT, threshold=threshold)
        events = simulate_recording(bar, "edge", sensor=sensor).events
        crossed = events[(events.x == 17) & (events.y > 6) & (events.y < 27)]
        per_pixel = len(crossed) / 20
        assert per_pixel == pytest.approx(np.log(1 / sensor.background) / threshold, abs=0.5)


def test_times_do_not_hang_on_the_rendered_images():
    bar = np.zeros((26, 26))
    bar[:, :13] = 1.0
    sensor = replace(QUIET, path=RIGHT)
    fine, coarse = (
        simulate_recording(bar, "edge", sensor=replace(sensor, frame_time=step)).events for step in (1_000, 10_000)
    )
    at_17, at_18 = ([events.t[events.x == column].mean() for events in (fine, coarse)] for column in (17, 18))
    assert at_18[0] - at_17[0] > 20_000
    assert at_17[0] == pytest.approx(at_17[1], abs=1_500) and at_18[0] == pytest.approx(at_18[1], abs=1_500)


def test_the_image_rests_at_the_corners_of_its_path():
    rate = np.bincount(digit(0, sensor=QUIET).events.t // 10_000, minlength=30)[:30].reshape(3, 10)
    assert (rate[:, [0, 9]] < 0.5 * rate[:, 4:6]).all()


def test_mismatch_belongs_to_the_camera():
    bar = np.zeros((26, 26))
    bar[:, :13] = 1.0
    sensor = replace(QUIET, path=RIGHT, threshold=0.05, mismatch=0.2)

    def counts(*key: str, **changes) -> np.ndarray:
        recording = simulate_recording(bar, *key, sensor=replace(sensor, **changes))
        return make_frames(recording, FrameOptions(1))[0, 1, 7:27, 15:20].ravel()

    same, other = np.corrcoef([counts("a"), counts("b"), counts("a", seed=1)])[0, 1:]
    assert same > 0.95 > other


def test_sensor_size_and_path_are_free():
    sensor = SimulatedSensor(SensorSize(48, 64), image_size=40, path=CLOSED_LOOP, reach=8.0, duration=100_000)
    recording = digit(5, sensor=sensor)
    check_recording(recording, "simulated")
    assert recording.sensor == (48, 64)
    assert recording.events.t[-1] > 95_000 and recording.events.x.max() >= 48


def test_digits_look_like_n_mnist():
    """1 to 8 thousand events each, about half of each polarity; all 1,797 in well under a minute."""
    begin = time.process_time()
    recordings = [digit(index) for index in range(60)]
    seconds = time.process_time() - begin
    counts = np.array([len(recording.events) for recording in recordings])
    assert counts.min() > 1000 and counts.max() < 9000
    brighter = np.mean([recording.events.p.mean() for recording in recordings])
    assert 0.4 < brighter < 0.6
    assert seconds / 60 * 1797 < 60
