"""A checkpoint that does not fit is refused on every rank, and stays as it is."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from megasnn.checkpoint.job import LOCK, NOTE
from tests.faults.launch import PP2, TINY, TP2, Ended, Ranks, refused
from tests.faults.test_bad_data import SECONDS


def contents(folder: Path) -> dict[str, str]:
    """Files and their hashes, without the lock and its note: a refused run held it, too."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (LOCK, NOTE)
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


def test_one_that_does_not_fit_names_what_differs(saved, tmp_path) -> None:
    refused(resume(saved, tmp_path, "--embed-dim", "64", "--tau", "3.0"), "embed_dim", "32", "64", "tau")


def test_a_damaged_one_gives_way_to_the_one_before_unless_it_is_asked_for(saved, tmp_path) -> None:
    """One bit of the newest checkpoint, in what the second rank wrote."""
    folder = shutil.copytree(saved, tmp_path / "damaged")
    file = folder / "iter_0000004" / "rank_00001.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    argv = [*TINY, *PP2, "--load", str(folder), "--train-iters", "5"]
    ended = Ranks(tmp_path / "ranks", 2, *argv).end(SECONDS)
    assert ended.status == [0, 0] and "continuing at iteration 2, 8 samples consumed" in ended.output[0]
    assert sum(line.startswith("WARNING") and "damaged" in line for line in ended.output[0].splitlines()) == 1
    refused(resume(folder, tmp_path / "asked", "--ckpt-step", "4"), "iter_0000004/rank_00001.safetensors was altered")
