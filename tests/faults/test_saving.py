"""What a run as a program does when it cannot save, when another run saves in its folder, and when it is restarted."""

from __future__ import annotations

import os
import platform
import re

from megasnn.checkpoint.folder import list_checkpoints
from megasnn.checkpoint.lock import LOCK, NOTE, FolderLock
from tests.faults.launch import ENDLESS, PP2, TINY, Ranks, Torchrun, refused
from tests.training.runs import same, saved


def test_the_exit_status_tells_that_the_last_checkpoint_is_missing(tmp_path) -> None:
    folder = tmp_path / "run"
    argv = [*TINY, *PP2, "--save", str(folder), "--save-interval", "1", "--async-save"]
    ended = Ranks(tmp_path / "ranks", 2, *argv, fault=("full_disk", 1)).end(30)
    assert ended.status == [3, 3]
    told = re.findall(
        r"the checkpoint of iteration (\d) was NOT SAVED; .*\n.*rank 1: OSError: .*No space", ended.output[0]
    )
    assert told == ["2", "3", "4"] and "iteration 4/ 4" in ended.output[0]
    assert list_checkpoints(folder) == [1] and not list(folder.glob("*.tmp"))


def test_an_error_waits_for_the_checkpoint_that_is_being_written(tmp_path) -> None:
    folder = tmp_path / "run"
    argv = [*TINY, *PP2, "--save", str(folder), "--save-interval", "1", "--async-save"]
    ended = Ranks(tmp_path / "ranks", 2, *argv, fault=("raise_while_saving", 1)).end(30)
    assert ended.status == [1, 1] and "injected fault" in ended.output[1]
    assert list_checkpoints(folder) == [1] and not list(folder.glob("*.tmp"))


def test_a_rank_on_a_disk_of_its_own_is_refused(tmp_path) -> None:
    folder = tmp_path / "run"
    save = os.path.relpath(folder)
    ended = Ranks(tmp_path / "ranks", 2, *TINY, *PP2, "--save", save, fault=("disk_of_its_own", 1)).end(30)
    refused(ended, f"--save {save} must be one folder that all hosts share", f"{platform.node()} (rank 1)")
    assert {path.name for path in folder.iterdir()} == {LOCK, NOTE}  # no mark is left, and another run may begin
    FolderLock(folder).release()


def test_two_runs_in_one_folder(tmp_path) -> None:
    folder = tmp_path / "run"
    first = Ranks(tmp_path / "first", 1, *TINY, *ENDLESS, "--save", str(folder))
    first.wait_for("iteration      2/")
    second = Ranks(tmp_path / "second", 2, *TINY, *PP2, "--load", str(folder), "--save", str(folder)).end(20)
    refused(second, "another run", f"process {first.processes[0].pid}", str(folder), "--save")
    assert first.processes[0].is_alive()


def test_torchrun_brings_a_job_back_after_a_killed_rank(tmp_path) -> None:
    folder = tmp_path / "run"
    argv = ["stall_the_first_time", "1", *TINY, *PP2, "--save", str(folder), "--save-interval", "1"]
    run = Torchrun(tmp_path / "torchrun", 2, "tests/faults/driver.py", *argv, restarts=1)
    run.kill_stalled()
    ended = run.end(60)
    assert ended.status == [0] and "continuing at iteration 1, 4 samples consumed" in ended.output[0]
    alone = tmp_path / "alone"
    assert Ranks(tmp_path / "ranks", 2, *TINY, *PP2, "--save", str(alone)).end(30).status == [0, 0]
    assert same(saved(folder), saved(alone))
