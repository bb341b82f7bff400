"""A checkpoint is there as a whole or not at all; superfluous ones go; one run saves in a folder at a time."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from megasnn.checkpoint.folder import LATEST, go_back, list_checkpoints, name_best, prune
from megasnn.checkpoint.load import load_global_tensors
from megasnn.checkpoint.lock import FolderLock
from megasnn.checkpoint.save import save_global_tensors
from megasnn.common.files import CheckpointError, NoCheckpointError


def save(folder: Path, iteration: int, value: float = 0.0, **progress: int) -> None:
    save_global_tensors(folder, {"weight": torch.full((4, 3), value)}, iteration=iteration, **progress)


def loaded(folder: Path, step: int | None = None) -> float:
    return load_global_tensors(folder, step)["weight"].unique().item()


def test_checkpoints_are_listed_in_order(tmp_path):
    for iteration in (3, 20, 12345678):
        save(tmp_path, iteration, iteration)
    assert list_checkpoints(tmp_path) == [3, 20, 12345678] and list_checkpoints(tmp_path / "absent") == []
    assert (loaded(tmp_path), loaded(tmp_path, 20), loaded(tmp_path, 3)) == (12345678, 20, 3)
    for step in (None, 20):
        assert loaded(tmp_path / "iter_0000020", step) == 20
    with pytest.raises(CheckpointError, match="iter_0000020 .*not of 3"):
        loaded(tmp_path / "iter_0000020", 3)


def test_a_folder_is_what_its_description_says(tmp_path):
    """Folders that were renamed, swapped or copied are not taken by their names."""
    for iteration in (10, 20, 30):
        save(tmp_path, iteration, iteration)
    (tmp_path / "iter_0000010").rename(tmp_path / "aside")
    (tmp_path / "iter_0000020").rename(tmp_path / "iter_0000010")
    (tmp_path / "aside").rename(tmp_path / "iter_0000020")
    shutil.copytree(tmp_path / "iter_0000030", tmp_path / "iter_0000040")
    with pytest.warns(UserWarning, match="iter_0000040 holds the checkpoint of iteration 30"):
        assert loaded(tmp_path) == 30
    with pytest.raises(CheckpointError, match="iter_0000020 holds the checkpoint of iteration 10: it was renamed"):
        loaded(tmp_path, 20)
    (tmp_path / "iter_0000010").rename(tmp_path / "kept")  # by its content under a name that says nothing
    assert loaded(tmp_path / "kept") == loaded(tmp_path / "kept", 20) == 20
    with pytest.raises(CheckpointError, match="kept .*not of 10"):
        loaded(tmp_path / "kept", 10)


def test_what_a_killed_run_left_behind_never_counts(tmp_path):
    save(tmp_path, 10, 1.0)
    shutil.copytree(tmp_path / "iter_0000010", tmp_path / "iter_0000020.tmp")
    (tmp_path / "iter_0000020.tmp" / "left.safetensors").write_bytes(b"x")
    assert list_checkpoints(tmp_path) == [10] and loaded(tmp_path) == 1.0
    with pytest.raises(CheckpointError, match="20 .*--ckpt-step.*10"):
        loaded(tmp_path, 20)
    save(tmp_path, 20, 2.0)
    save(tmp_path, 20, 3.0)  # again: it is replaced
    assert loaded(tmp_path) == 3.0 and not (tmp_path / "iter_0000020" / "left.safetensors").exists()
    (tmp_path / "iter_0000030.tmp").mkdir()
    FolderLock(tmp_path).release()  # the next run cleans up
    assert sorted(path.name for path in tmp_path.glob("iter*")) == [
        "iter_0000010", "iter_0000020", "iter_0000020.given_up"
    ]  # fmt: skip


@pytest.mark.parametrize("again", [20, 10])
def test_killed_before_any_step_of_a_save_nothing_saved_is_lost(tmp_path, again):
    """A save is killed before its first fsync or rename, then before the second, until one gets through."""
    killed = 0
    while _save_is_killed(folder := tmp_path / f"{killed}", killed, again):
        found = {path: loaded(path) for path in folder.glob("iter_*") if path.suffix != ".tmp"}
        assert 1.0 in found.values() and set(found.values()) <= {1.0, 2.0}
        if again == 20 or list_checkpoints(folder):
            assert loaded(folder) == found[folder / f"iter_{list_checkpoints(folder)[-1]:07d}"]
        else:  # the run would not begin anew
            with pytest.raises(CheckpointError) as raised:
                loaded(folder)
            assert not isinstance(raised.value, NoCheckpointError)
        killed += 1
    assert loaded(folder) == 2.0 and (folder / LATEST).read_text() == f"{again}\n"
    assert killed >= 8  # the file of tensors, the description, three folders, two renames, and moving `latest`


def _save_is_killed(folder: Path, call: int, again: int) -> bool:
    save(folder, 10, 1.0)
    child = os.fork()
    if child == 0:
        remaining = iter(range(call, -2, -1))
        for name in ("fsync", "rename", "replace"):
            setattr(os, name, _deadly(getattr(os, name), remaining))
        try:
            save(folder, again, 2.0)
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


# --- retention


def kept(folder: Path, steps: Iterable[int], *retention: int | None, bad: Iterable[int] = ()) -> list[int]:
    """Iterations that stay when each save is followed by a removal; those of `bad` followed skipped steps."""
    for step in steps:
        save(folder, step, skipped_steps=int(step in bad))
        list(prune(folder, *retention))
    return list_checkpoints(folder)


def test_so_many_are_kept(tmp_path):
    assert kept(tmp_path / "a", range(1, 8), 2) == [6, 7]
    assert kept(tmp_path / "b", range(1, 8), 2, 3) == [3, 6, 7]
    assert kept(tmp_path / "c", (10, 20, 30, 5, 6), 2) == [5, 6]  # went back: the others are put aside
    assert len(list((tmp_path / "c").glob("*.given_up"))) == 2
    assert kept(tmp_path / "d", range(1, 4), None) == [1, 2, 3]
    assert not [path for path in tmp_path.glob("*/*") if path.name.endswith(".tmp")]


def test_the_best_stays_and_a_course_that_was_given_up_is_put_aside(tmp_path):
    assert kept(tmp_path, (1, 2), 1) == [2]
    name_best(tmp_path, 2)
    assert kept(tmp_path, (3, 4), 1) == [2, 4]
    save(tmp_path, 100, 1.0)
    go_back(tmp_path, 4)
    assert loaded(tmp_path) == 0.0 and loaded(tmp_path / "iter_0000100.given_up") == 1.0
    assert kept(tmp_path, (5, 200), 2) == [2, 5, 200] and loaded(tmp_path) == 0.0


def test_a_bad_or_damaged_one_pushes_out_no_good_one(tmp_path):
    assert kept(tmp_path, range(1, 9), 2, bad=range(4, 9)) == [2, 3, 7, 8]
    assert kept(tmp_path, (9, 10), 2) == [9, 10]
    for file in (tmp_path / "iter_0000010").glob("*.safetensors"):
        file.write_bytes(b"")
    assert kept(tmp_path, [11], 2) == [9, 10, 11]


# --- the lock, and restarted jobs


def test_a_second_run_is_refused_until_the_first_has_ended_however(tmp_path):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        lock = FolderLock(tmp_path)
        os.write(writing, b"x")
        time.sleep(60)
        lock.release()
        os._exit(0)
    os.read(reading, 1)
    with pytest.raises(CheckpointError, match=rf"another run \(.*process {child}.*--save"):
        FolderLock(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    FolderLock(tmp_path).release()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="--save"):
        FolderLock(tmp_path / "file")


def claims(
    monkeypatch, folder: Path, name: str, restarts: int = 0, continues: bool = False, adopts: bool = True
) -> bool | None:
    """Whether a job of this name, restarted so often, goes on with its own checkpoints; None where it is refused.

    Without `adopts` it ends before it has loaded the checkpoint that it continues from.
    """
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    try:
        lock = FolderLock(folder, continues)
    except CheckpointError as error:
        assert "--load" in str(error) and "--save" in str(error)
        return None
    if adopts:
        lock.adopt()
    lock.release()
    return lock.restarted


def test_a_restarted_job_goes_on_with_its_own_checkpoints_only(tmp_path, monkeypatch):
    assert claims(monkeypatch, tmp_path, "none") is False
    assert claims(monkeypatch, tmp_path, "none", restarts=1) is False  # nothing is there
    save(tmp_path, 5)
    assert claims(monkeypatch, tmp_path, "none", restarts=2) is True
    assert claims(monkeypatch, tmp_path, "none") is None
    assert claims(monkeypatch, tmp_path, "none", restarts=1) is None  # torchrun starts the refused job again
    assert claims(monkeypatch, tmp_path, "a") is None
    assert claims(monkeypatch, tmp_path, "a", restarts=1) is None
    for _ in range(2):  # until it has loaded, --load and --ckpt-step hold again
        assert claims(monkeypatch, tmp_path, "a", continues=True, adopts=False) is False
    assert claims(monkeypatch, tmp_path, "a", restarts=1) is None
    assert claims(monkeypatch, tmp_path, "a", continues=True) is False  # by --load
    save(tmp_path, 6)
    assert claims(monkeypatch, tmp_path, "a") is True  # torchrun counts no restart where nodes come and go
    assert claims(monkeypatch, tmp_path, "b") is None


def test_a_restarted_run_waits_for_the_one_before(tmp_path, monkeypatch):
    before = FolderLock(tmp_path)
    threading.Timer(0.4, before.release).start()
    began = time.monotonic()
    claims(monkeypatch, tmp_path, "none", restarts=1)
    assert 0.3 < time.monotonic() - began < 15
