"""A run that cannot report trains on, saves, and ends with status 0."""

from __future__ import annotations

from megasnn.checkpoint.folder import list_checkpoints
from tests.faults.launch import PP2, TINY, Ranks
from tests.small_disk import fill, small_disk


def test_tensorboard_and_pictures_on_a_full_disk(tmp_path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        fill(disk)
        flags = ["--tensorboard-dir", str(disk / "board"), "--profile-step", "2"]
        ended = Ranks(tmp_path / "ranks", 2, *TINY, *PP2, *flags, "--save", str(tmp_path / "run")).end(40)
        assert ended.status == [0, 0] and list_checkpoints(tmp_path / "run") == [4], ended.output
        assert ended.output[0].count("WARNING") == 1 and "WARNING" not in ended.output[1], ended.output
        assert str(disk) in ended.output[0] and "No space left on device" in ended.output[0]
        assert "iteration 4/ 4" in ended.output[0]
