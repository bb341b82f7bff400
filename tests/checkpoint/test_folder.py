"""A checkpoint is there as a whole or not at all."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megasnn.checkpoint import (
    CheckpointError,
    find_checkpoint,
    list_checkpoints,
    load_global_tensors,
    save_global_tensors,
)
from megasnn.checkpoint.folder import LATEST


def save(folder: Path, iteration: int, value: float) -> None:
    save_global_tensors(folder, {"weight": torch.full((4, 3), value)}, iteration=iteration)


def loaded(folder: Path, step: int | None = None) -> float:
    return load_global_tensors(folder, step)["weight"].unique().item()


def test_checkpoints_are_listed_in_order(tmp_path):
    for iteration in (12345678, 20, 3):
        save(tmp_path, iteration, iteration)
    (tmp_path / "iter_0000007").mkdir()
    (tmp_path / "notes").mkdir()
    assert list_checkpoints(tmp_path) == [3, 20, 12345678]
    assert list_checkpoints(tmp_path / "absent") == []
    assert (loaded(tmp_path), loaded(tmp_path, 20), loaded(tmp_path, 12345678)) == (3, 20, 12345678)
    assert find_checkpoint(tmp_path, 20) == tmp_path / "iter_0000020"
    for step in (None, 20):
        assert loaded(tmp_path / "iter_0000020", step) == 20
    with pytest.raises(
        CheckpointError, match=r"iter_0000020 is the checkpoint of iteration 20, not of 3 \(--ckpt-step\)"
    ):
        loaded(tmp_path / "iter_0000020", 3)


def test_what_a_killed_run_left_behind_never_counts(tmp_path):
    save(tmp_path, 10, 1.0)
    shutil.copytree(tmp_path / "iter_0000010", tmp_path / "iter_0000020.tmp")
    (tmp_path / "iter_0000020.tmp" / "left.distcp").write_bytes(b"x")
    assert list_checkpoints(tmp_path) == [10]
    assert loaded(tmp_path) == 1.0
    with pytest.raises(CheckpointError, match="no checkpoint of iteration 20"):
        loaded(tmp_path, 20)
    save(tmp_path, 20, 2.0)
    assert loaded(tmp_path) == 2.0
    assert not (tmp_path / "iter_0000020.tmp").exists()
    assert not (tmp_path / "iter_0000020" / "left.distcp").exists()


def test_a_step_saved_again_is_replaced(tmp_path):
    for value in (1.0, 2.0):
        save(tmp_path, 10, value)
    assert loaded(tmp_path) == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", LATEST]


def test_killed_before_any_step_of_a_save_an_intact_checkpoint_remains(tmp_path):
    """A save is killed before its first fsync or rename, then before the second, until one gets through."""
    killed = 0
    while _save_is_killed(tmp_path / f"{killed}", killed):
        folder = tmp_path / f"{killed}"
        latest = (folder / LATEST).read_text().strip()
        assert (latest, loaded(folder)) in [("10", 1.0), ("20", 2.0)]
        assert set(list_checkpoints(folder)) <= {10, 20}
        killed += 1
    assert loaded(tmp_path / f"{killed}") == 2.0
    assert killed >= 9  # two files of tensors, the description, three folders, two renames, and moving `latest`


def _save_is_killed(folder: Path, call: int) -> bool:
    save(folder, 10, 1.0)
    child = os.fork()
    if child == 0:
        remaining = iter(range(call, -2, -1))
        for name in ("fsync", "rename", "replace"):
            setattr(os, name, _deadly(getattr(os, name), remaining))
        try:
            save(folder, 20, 2.0)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


def _deadly(function: Callable[..., None], remaining: Iterator[int]) -> Callable[..., None]:
    def counted(*arguments: object, **keywords: object) -> None:
        if next(remaining, -1) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keywords)

    return counted
