"""megasnn-show-data: pictures of the samples in shards."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

from megasnn.commands import show_data
from megasnn.events import FrameOptions, make_frames
from tests.data.shard_files import as_events, as_frames, recording, write_shard, write_shards


def test_events_frames_and_images_are_drawn(tmp_path, monkeypatch) -> None:
    sheet, sheets, output = show_data.sample_sheet, [], tmp_path / "e.png"
    monkeypatch.setattr(show_data, "sample_sheet", lambda *drawn: sheets.append(drawn) or sheet(*drawn))
    events = write_shard(tmp_path / "e.tar", as_events(range(5)))
    frames = write_shard(tmp_path / "f.tar", as_frames(range(5), FrameOptions(3)))
    images = "::".join(map(str, write_shards(tmp_path, samples=20, per_shard=10)))
    for shards, *flags in ((images, "30"), (frames, "3"), (events, "3", "--time-steps", "4")):
        assert show_data.main([str(shards), "--output", str(output), "--samples", *flags]) == 0
    picture = np.asarray(Image.open(output))
    assert picture.shape[1:] == (1200, 3) and (picture[..., 0] != picture[..., 2]).any(), "colours of events"
    (images, _), (frames, captions), (events, _) = sheets
    assert [int(array[0, 0]) for array in images] == list(range(20))
    assert captions == ["r0   class 0", "r2   class 2", "r4   class 1"], "spread over all"
    assert frames[0].shape == (3, 2, 12, 16), "finished frames are shown as they are"
    assert np.array_equal(events[1], make_frames(recording(2), FrameOptions(4)))


@pytest.mark.parametrize(
    "flags, message",
    [
        (["{shards}/a.tar", "--output", "{shards}/a.doc"], "doc"),
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
