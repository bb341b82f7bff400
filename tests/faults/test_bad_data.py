"""Data that cannot be used: named on every rank, nothing written; broken samples are skipped and counted if asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.data.shard_files import numbered, write_shard
from tests.faults.launch import PP2, TINY, Ended, Ranks, refused

SECONDS = 90.0  # start included


def run(tmp_path: Path, data: object, *flags: str) -> Ended:
    folder = tmp_path / "saved"
    argv = [*TINY, "--data-path", str(data), "--save", str(folder), *PP2, *flags]
    ended = Ranks(tmp_path / "ranks", 2, *argv).end(SECONDS)
    assert any(ended.status) != (folder / "latest_checkpointed_iteration.txt").exists()
    return ended


@pytest.fixture
def broken(tmp_path) -> Path:
    samples = numbered(range(12))
    samples["s009"]["png"] = b"not an image"
    return write_shard(tmp_path / "broken.tar", samples)


def test_a_broken_image_is_named_on_every_rank(tmp_path, broken) -> None:
    """Rank 1 reads labels only; it hears of it from rank 0."""
    refused(run(tmp_path, broken, "--no-shuffle"), f"sample 's009' of shard {broken}", "--skip-broken-samples")


def test_broken_images_are_skipped_and_counted(tmp_path, broken) -> None:
    flags = ["--no-shuffle", "--skip-broken-samples", "--tensorboard-dir", str(tmp_path / "board")]
    argv = [*TINY, "--data-path", str(broken), "--valid-data-path", str(broken), "--eval-iters", "none"]
    argv += ["--train-iters", "6", *PP2, *flags]
    ended = Ranks(tmp_path, 2, *argv).end(SECONDS)
    assert ended.status == [0, 0], ended.output
    # Sample 9 of 12 comes in the third and in the sixth global batch of 4, and once when all are evaluated at the end.
    assert re.findall(r"number of skipped samples: (\d+)", ended.output[0]) == ["1", "1", "1", "2", "1"]
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [event.value for event in board.Scalars("8_data/skipped_samples")] == [1, 1, 1, 2]
    assert [event.value for event in board.Scalars("8_data/skipped_validation_samples")] == [1]
