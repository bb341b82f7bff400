"""A checkpoint that does not fit is refused on every rank, and stays as it is."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import pytest

from megasnn.checkpoint.job import LOCK
from tests.faults.launch import PP2, TINY, TP2, Ended, Ranks
from tests.faults.test_bad_data import SECONDS, refused


def contents(folder: Path) -> dict[str, str]:
    """What is there, without the lock: a refused run held it, too."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOCK
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    ended = Ranks(folder / "ranks", 2, *TINY, *PP2, "--save", str(folder / "run"), "--save-interval", "2").end(30)
    assert ended.status == [0, 0], ended.output
    return folder / "run"


def resume(saved: Path, tmp_path: Path, *flags: str) -> Ended:
    before = contents(saved)
    argv = [*TINY, *TP2, "--load", str(saved), "--save", str(saved), "--train-iters", "6", *flags]
    ended = Ranks(tmp_path, 2, *argv).end(SECONDS)
    assert contents(saved) == before
    return ended


def test_of_another_model(saved, tmp_path) -> None:
    refused(resume(saved, tmp_path, "--embed-dim", "64", "--depth", "2"), "embed_dim", "32", "64", "depth")


def test_of_another_neuron(saved, tmp_path) -> None:
    refused(resume(saved, tmp_path, "--tau", "3.0"), "tau", "2.0", "3.0")


def test_with_another_order_of_the_data(saved, tmp_path) -> None:
    refused(resume(saved, tmp_path, "--seed", "7"), "seed", "1234", "7", "--finetune")


def test_with_other_data(saved, tmp_path, shards) -> None:
    refused(resume(saved, tmp_path, "--data-path", str(shards[0])), "dataset", "other data", "--finetune")


def test_of_a_step_that_was_not_saved(saved, tmp_path) -> None:
    refused(resume(saved, tmp_path, "--ckpt-step", "3"), "3", "2, 4", "--ckpt-step")


@pytest.fixture
def damaged(saved, tmp_path) -> Path:
    """One bit of the newest checkpoint, in what the second rank wrote."""
    folder = shutil.copytree(saved, tmp_path / "damaged")
    file = folder / "iter_0000004" / "rank_00001.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    return folder


def test_that_was_damaged_gives_way_to_the_one_before(damaged, tmp_path) -> None:
    argv = [*TINY, *PP2, "--load", str(damaged), "--train-iters", "5"]
    ended = Ranks(tmp_path / "ranks", 2, *argv).end(SECONDS)
    assert ended.status == [0, 0] and "continuing at iteration 2, 8 samples consumed" in ended.output[0]
    warnings = [line for line in ended.output[0].splitlines() if line.startswith("WARNING") and "damaged" in line]
    assert len(warnings) == 1 and "iter_0000004 is damaged and was passed over" in warnings[0]
    assert re.search(r"iter_0000004/rank_00001.safetensors was altered", ended.output[0])


def test_that_was_damaged_and_asked_for(damaged, tmp_path) -> None:
    refused(resume(damaged, tmp_path / "ranks", "--ckpt-step", "4"), "iter_0000004/rank_00001.safetensors was altered")


def test_none_where_there_must_be_one(tmp_path) -> None:
    argv = [*TINY, *PP2, "--load", str(tmp_path / "absent")]
    refused(Ranks(tmp_path, 2, *argv).end(SECONDS), str(tmp_path / "absent"), "--load")


def test_a_checkpoint_that_fits_goes_on_on_another_layout(saved, tmp_path) -> None:
    """So that the refusals above are refusals of what differs."""
    argv = [*TINY, *TP2, "--load", str(saved), "--train-iters", "6"]
    ended = Ranks(tmp_path, 2, *argv).end(SECONDS)
    assert ended.status == [0, 0] and "continuing at iteration 4, 16 samples consumed" in ended.output[0]
