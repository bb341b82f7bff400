"""A checkpoint is there as a whole or not at all, and those go that a run keeps no longer."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from megasnn.checkpoint import (
    CheckpointError,
    Retention,
    find_checkpoint,
    list_checkpoints,
    load_global_tensors,
    save_global_tensors,
    verify_checkpoint,
)
from megasnn.checkpoint.folder import BEST, LATEST, reading, remove, superfluous


def save(folder: Path, iteration: int, value: float = 0.0, **progress: int) -> None:
    save_global_tensors(folder, {"weight": torch.full((4, 3), value)}, iteration=iteration, **progress)


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
    with pytest.raises(CheckpointError, match="iter_0000020 .*not of 3"):
        loaded(tmp_path / "iter_0000020", 3)


def test_what_a_killed_run_left_behind_never_counts(tmp_path):
    save(tmp_path, 10, 1.0)
    shutil.copytree(tmp_path / "iter_0000010", tmp_path / "iter_0000020.tmp")
    (tmp_path / "iter_0000020.tmp" / "left.safetensors").write_bytes(b"x")
    assert list_checkpoints(tmp_path) == [10] and loaded(tmp_path) == 1.0
    with pytest.raises(CheckpointError, match="20 .*--ckpt-step.*10"):
        loaded(tmp_path, 20)
    save(tmp_path, 20, 2.0)
    assert loaded(tmp_path) == 2.0
    assert not (tmp_path / "iter_0000020.tmp").exists()
    assert not (tmp_path / "iter_0000020" / "left.safetensors").exists()


def test_a_step_saved_again_is_replaced(tmp_path):
    for value in (1.0, 2.0):
        save(tmp_path, 10, value)
    assert loaded(tmp_path) == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", LATEST]


def test_a_run_killed_while_it_replaced_a_checkpoint_leaves_the_old_one(tmp_path):
    save(tmp_path, 7, 1.0)
    (tmp_path / "iter_0000007").rename(tmp_path / "iter_0000007.replaced.tmp")
    assert list_checkpoints(tmp_path) == [7] and loaded(tmp_path) == 1.0
    save(tmp_path, 7, 2.0)
    assert loaded(tmp_path) == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000007", LATEST]
    assert all(problem is None for _, problem in verify_checkpoint(tmp_path / "iter_0000007"))


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
    assert killed >= 8  # the file of tensors, the description, three folders, two renames, and moving `latest`


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


# --- what is kept


def kept(folder: Path, steps: Iterable[int], retention: Retention, bad: Iterable[int] = ()) -> list[int]:
    """What stays when each save is followed by a removal; those of `bad` followed skipped steps."""
    for step in steps:
        save(folder, step, skipped_steps=int(step in bad))
        list(remove(superfluous(folder, retention)))
    return list_checkpoints(folder)


def test_so_many_are_kept(tmp_path):
    assert kept(tmp_path / "a", range(1, 8), Retention(2)) == [6, 7]
    assert kept(tmp_path / "b", range(1, 8), Retention(2, 3)) == [3, 6, 7]
    assert kept(tmp_path / "c", (10, 20, 30, 5, 6), Retention(2)) == [5, 6]  # went back: what was saved last counts
    assert kept(tmp_path / "d", range(1, 4), Retention()) == [1, 2, 3]
    assert not [path for path in tmp_path.glob("*/*") if path.name.endswith(".tmp")]


def test_the_best_and_those_of_another_run_stay(tmp_path):
    for step in (100, 200):
        save(tmp_path, step)
    assert kept(tmp_path, (1, 2, 3), Retention(1, others=2)) == [3, 100, 200]
    (tmp_path / BEST).write_text("3\n")
    assert kept(tmp_path, (4, 5), Retention(1, others=2)) == [3, 5, 100, 200]


def test_one_that_followed_skipped_steps_pushes_out_no_good_one(tmp_path):
    assert kept(tmp_path, range(1, 9), Retention(2), bad=range(4, 9)) == [2, 3, 7, 8]
    assert kept(tmp_path, (9, 10), Retention(2)) == [9, 10]


def test_one_that_is_being_read_or_damaged_is_not_removed(tmp_path):
    save(tmp_path, 1)
    with reading(tmp_path / "iter_0000001"):
        assert kept(tmp_path, [2], Retention(1)) == [1, 2]
    assert kept(tmp_path, [3], Retention(1)) == [3]
    for file in (tmp_path / "iter_0000003").glob("*.safetensors"):
        file.write_bytes(b"")
    assert kept(tmp_path, [4], Retention(1)) == [3, 4]
    assert kept(tmp_path, [5], Retention(2)) == [3, 4, 5]
