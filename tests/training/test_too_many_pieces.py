"""A run whose checkpoints could not be described is refused before its first step, and counts what would be written."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from megasnn.checkpoint import CheckpointError, saving
from tests.training.runs import train


def trained(most: int, *flags: str) -> str:
    """What refuses the run, where so many values are read; or nothing."""
    with mock.patch.object(saving, "MOST_VALUES", most):
        try:
            train(*flags, "--train-iters", "1", "--eval-iters", "0")
        except CheckpointError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    "flags",
    [
        "--use-distributed-optimizer --ema-decay 0.5 --lr-scale-of patch_embed=0",
        "--tensor-model-parallel-size 2",
        "--optimizer sgd",
    ],
)
def test_counted_before_as_written_behind(ranks, tmp_path: Path, flags: str) -> None:
    cache, folder = str(tmp_path / "cache"), tmp_path / "run"
    given = (cache, "--save", str(folder), *flags.split())
    assert ranks(2, trained, 4_000_000, *given) == ["", ""]
    text = (folder / "iter_0000001" / "pieces.json").read_text()
    written = sum(map(text.count, ",[{"))
    refused = ranks(2, trained, written - 1, cache, "--save", str(tmp_path / "other"), *flags.split())
    told = f"a checkpoint of this run could not be saved: {written} values would describe its pieces"
    assert all(told in each for each in refused) and not list((tmp_path / "other").glob("iter_*"))
