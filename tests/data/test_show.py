"""megasnn-show-data: pictures of the samples in shards."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

from megasnn.commands import show_data
from megasnn.commands.show_data import read_samples
from megasnn.events import FrameOptions, make_frames
from tests.data.shard_files import as_events, as_frames, recording, write_shard, write_shards


def test_events_frames_and_images_are_drawn(tmp_path) -> None:
    shard, output = write_shard(tmp_path / "e.tar", as_events(range(5))), tmp_path / "e.png"
    assert show_data.main([str(shard), "--output", str(output), "--samples", "3", "--time-steps", "4"]) == 0
    picture = np.asarray(Image.open(output))
    assert picture.shape[1:] == (1200, 3) and (picture[..., 0] != picture[..., 2]).any(), "colours of events"
    assert np.array_equal(read_samples(str(shard), 3, time_steps=4)[0][1], make_frames(recording(2), FrameOptions(4)))

    frames = write_shard(tmp_path / "f.tar", as_frames(range(5), FrameOptions(3)))
    arrays, captions = read_samples(str(frames), 3)
    assert captions == ["r0   class 0", "r2   class 2", "r4   class 1"], "spread over all"
    assert arrays[0].shape == (3, 2, 12, 16), "finished frames are shown as they are"

    images = "::".join(map(str, write_shards(tmp_path, samples=20, per_shard=10)))
    assert [int(array[0, 0]) for array in read_samples(images, 30)[0]] == list(range(20))


@pytest.mark.parametrize(
    "flags, message",
    [
        (["{shards}/a.tar", "--output", "{shards}/a.jpg"], "--output"),
        (["{shards}/broken.tar"], "sample 'r1' of shard"),
    ],
)
def test_bad_input(tmp_path, capsys, flags, message) -> None:
    write_shard(tmp_path / "a.tar", as_events(range(3)))
    broken = as_events(range(3))
    broken["r1"]["events.npz"] = broken["r1"]["events.npz"][:50]
    write_shard(tmp_path / "broken.tar", broken)
    argv = [flag.format(shards=tmp_path) for flag in flags]
    output = [] if "--output" in argv else ["--output", str(tmp_path / "a.png")]
    assert show_data.main([*argv, *output]) == 1
    assert re.search(message, capsys.readouterr().err) and not list(tmp_path.glob("*.png"))
