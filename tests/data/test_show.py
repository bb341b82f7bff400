"""megasnn-show-data: pictures of what is in shards."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from PIL import Image

from megasnn.commands import show_data
from megasnn.commands.show_data import read_samples
from megasnn.events import FrameOptions, make_frames
from tests.data.shard_files import write_shard, write_shards
from tests.data.test_events import as_events, as_frames, recording


def test_events_are_drawn_as_rows_of_frames(tmp_path) -> None:
    shard = write_shard(tmp_path / "a.tar", as_events(range(5)))
    output = tmp_path / "a.png"
    assert show_data.main([str(shard), "--output", str(output), "--samples", "3", "--time-steps", "4"]) == 0
    picture = np.asarray(Image.open(output))
    assert picture.shape[1:] == (1200, 3) and (picture[..., 0] != picture[..., 2]).any(), "colours of events"
    arrays, captions = read_samples(str(shard), 3, time_steps=4)
    assert captions == ["r0   class 0", "r1   class 1", "r2   class 2"]
    assert np.array_equal(arrays[1], make_frames(recording(1), FrameOptions(4)))


def test_classes_have_names_where_an_index_knows_them(tmp_path) -> None:
    frames = write_shard(tmp_path / "a.tar", as_frames(range(5), FrameOptions(3)))
    index = {"version": 1, "options": {}, "classes": ["cat", "1", "dog"], "shards": []}
    (tmp_path / "index.json").write_text(json.dumps(index))
    arrays, captions = read_samples(str(frames), 3)
    assert captions == ["r0   class 0 (cat)", "r1   class 1", "r2   class 2 (dog)"]
    assert arrays[0].shape == (3, 2, 12, 16), "finished frames are shown as they are"


def test_images_and_random_ones(tmp_path) -> None:
    write_shards(tmp_path, samples=20, per_shard=10)
    arrays, captions = read_samples(str(tmp_path), 30)
    assert [int(array[0, 0]) for array in arrays] == list(range(20)) and arrays[0].shape == (8, 8)
    drawn = [read_samples(str(tmp_path), 5, seed)[1] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 5


@pytest.mark.parametrize(
    "flags, message",
    [
        (["{shards}/none.tar"], "do not exist"),
        (["{shards}/a.tar", "--output", "{shards}/a.jpg"], "must end in .png"),
        (["{shards}/a.tar", "--samples", "0"], "--samples must be at least 1"),
        (["{shards}/a.tar", "--time-steps", "0"], "--time-steps must be at least 1"),
        (["{shards}/broken.tar"], "sample 'r1' of shard"),
        (["{shards}/a.tar", "--output", "{shards}/no/where.png"], "no/where.png"),
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
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.glob("*.png"))
