"""Real recordings, where MEGASNN_DATA names a folder with them: known figures, and SpikingJelly's own readers."""

from __future__ import annotations

import lzma
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megasnn.events import FrameOptions, decode_recording, events_to_frames, read_recording
from tests.events.files import write
from tests.events.spikingjelly_events import cifar10_dvs, utils
from tests.events.test_readers import like_spikingjelly

FOLDER = os.environ.get("MEGASNN_DATA")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="MEGASNN_DATA names no folder with recordings")


def archive(name: str) -> Iterator[tuple[str, bytes]]:
    assert FOLDER is not None
    with tarfile.open(Path(FOLDER) / name) as tar:
        for member in tar:
            if member.name.endswith(".bs2"):
                file = tar.extractfile(member)
                assert file is not None
                yield member.name, file.read()


def test_jaer(tmp_path):
    with lzma.open(Path(FOLDER) / "aedat/MovingDarkBox.aedat.xz") as file:
        path = write(tmp_path, "MovingDarkBox.aedat", file.read())
    recording = read_recording(path)
    events = recording.events
    assert len(events) == 489_834 and recording.skipped == 0 and recording.sensor == (128, 128)
    assert (events.t[-1] - events.t[0]) / 1e6 == pytest.approx(39.8, abs=0.05)
    theirs = cifar10_dvs()._load_origin_data(path)
    assert like_spikingjelly(events, theirs)
    for split_by in ("number", "time"):
        frames = events_to_frames(events, recording.sensor, FrameOptions(10, split_by))
        assert np.array_equal(
            frames, utils().integrate_events_by_fixed_frames_number(theirs, split_by, 10, *recording.sensor)
        )
    frames = events_to_frames(events, recording.sensor, FrameOptions(None, duration=1_000_000))
    assert frames.shape[0] == 40
    assert np.array_equal(frames, utils().integrate_events_by_fixed_duration(theirs, 1_000_000, *recording.sensor))


def test_davis346():
    pytest.importorskip("aedat")
    recording = read_recording(Path(FOLDER) / "aedat/davis346_sample_MIT.aedat4")
    assert len(recording.events) == 6_676 and recording.sensor == (260, 346)


def test_n_mnist(tmp_path):
    recordings = total = 0
    for name, data in archive("nmnist_small/nmnist_small_1100.tar.xz"):
        recording = decode_recording(data, name)
        recordings, total = recordings + 1, total + len(recording.events)
        assert 1_000 < len(recording.events) < 9_000 and 290_000 < recording.events.t[-1] < 340_000
        if recordings % 50 == 0:
            assert like_spikingjelly(recording.events, utils().load_ATIS_bin(write(tmp_path, "one.bin", data)))
    assert (recordings, total) == (1_100, 4_518_827)


def test_dvs_gesture(tmp_path):
    counts = []
    for name, data in archive("dvs_gesture_10/dvs_gesture_10.tar.xz"):
        recording = decode_recording(data, name, sensor_size=(128, 128))
        counts.append(len(recording.events))
        assert recording.events.t[-1] / 1e6 == pytest.approx(1.45, abs=0.001)
        assert like_spikingjelly(recording.events, utils().load_ATIS_bin(write(tmp_path, "one.bin", data)))
    assert len(counts) == 10 and (min(counts), max(counts)) == (63_471, 181_179)
