"""One run saves in a folder at a time, and a job that was killed does not keep itself out."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megasnn.checkpoint import CheckpointError, save_global_tensors
from megasnn.checkpoint.job import FolderLock, JobFolder
from tests.checkpoint.test_folder import save


def test_a_second_run_is_refused_and_told_by_whom(tmp_path):
    first = FolderLock(tmp_path)
    with pytest.raises(CheckpointError, match=rf"another run \(.*process {os.getpid()}.*--save"):
        FolderLock(tmp_path)
    first.release()
    FolderLock(tmp_path).release()


def held_by_a_child(folder: Path) -> int:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        lock = FolderLock(folder)
        os.write(writing, b"x")
        time.sleep(60)
        lock.release()
        os._exit(0)
    os.read(reading, 1)
    return child


def test_a_lock_ends_with_its_holder_however_that_ends(tmp_path):
    child = held_by_a_child(tmp_path)
    with pytest.raises(CheckpointError, match=f"process {child}"):
        FolderLock(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    FolderLock(tmp_path).release()


def test_a_restarted_run_waits_for_the_one_before(tmp_path):
    child = held_by_a_child(tmp_path)
    killer = os.fork()
    if killer == 0:
        time.sleep(0.5)
        os.kill(child, signal.SIGKILL)
        os._exit(0)
    began = time.monotonic()
    FolderLock(tmp_path, patient=True).release()
    assert 0.3 < time.monotonic() - began < 15
    os.waitpid(killer, 0)
    os.waitpid(child, 0)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write into the folder .*file, check --save"):
        FolderLock(tmp_path / "file")


def job(monkeypatch, folder: Path, name: str, restarts: int = 0) -> bool:
    """Whether a job of this name, restarted so often, goes on with what it finds."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    opened = JobFolder(folder)
    opened.release()
    return opened.resumes


def test_a_restarted_job_goes_on_with_its_own_checkpoints_only(tmp_path, monkeypatch):
    save(tmp_path, 10, 1.0)
    assert not job(monkeypatch, tmp_path, "none")
    assert not job(monkeypatch, tmp_path, "none", restarts=1)  # what is there was there before
    save(tmp_path, 5, 1.0)
    assert job(monkeypatch, tmp_path, "none", restarts=2)
    assert not job(monkeypatch, tmp_path, "none")


def test_a_job_that_is_started_anew_when_nodes_come_and_go(tmp_path, monkeypatch):
    """torchrun does not count that as a restart; the job keeps its name."""
    assert not job(monkeypatch, tmp_path, "a")
    save(tmp_path, 5, 1.0)
    assert job(monkeypatch, tmp_path, "a")
    assert not job(monkeypatch, tmp_path, "b")


def test_what_killed_runs_left_is_removed(tmp_path, monkeypatch):
    save_global_tensors(tmp_path, {}, iteration=5)
    (tmp_path / "iter_0000006.tmp").mkdir()
    (tmp_path / "iter_0000005").rename(tmp_path / "iter_0000005.replaced.tmp")
    job(monkeypatch, tmp_path, "a")
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000005.replaced.tmp"]
