"""What a run as a program does when it cannot save, when another run saves in its folder, and when it is restarted."""

from __future__ import annotations

import os
import platform
import re
import signal
from pathlib import Path

import pytest
import torch

from megasnn.checkpoint.folder import list_checkpoints
from megasnn.checkpoint.job import LOCK, NOTE, FolderLock
from megasnn.checkpoint.load import load_global_tensors
from tests.faults.launch import PP2, PP3, TINY, Ranks, Torchrun
from tests.faults.test_bad_data import refused
from tests.faults.test_signals import ENDLESS, wait_for


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
    wait_for(first, "iteration      2/")
    second = Ranks(tmp_path / "second", 2, *TINY, *PP2, "--load", str(folder), "--save", str(folder)).end(20)
    refused(second, "another run", f"process {first.processes[0].pid}", str(folder), "--save")
    assert first.processes[0].is_alive()
    os.kill(first.processes[0].pid, signal.SIGKILL)
    first.processes[0].join()
    third = Ranks(tmp_path / "third", 2, *TINY, *PP2, "--load", str(folder), "--save", str(folder)).end(30)
    assert third.status == [0, 0] and list_checkpoints(folder) == [4]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> dict[str, torch.Tensor]:
    """What a run that is left alone ends with."""
    folder = tmp_path_factory.mktemp("straight")
    assert Ranks(folder / "ranks", 2, *TINY, *PP2, "--save", str(folder)).end(30).status == [0, 0]
    return load_global_tensors(folder, with_optimizer=True)


def same(folder: Path, expected: dict[str, torch.Tensor]) -> bool:
    ours = load_global_tensors(folder, with_optimizer=True)
    return ours.keys() == expected.keys() and all(torch.equal(ours[name], expected[name]) for name in ours)


def test_torchrun_brings_a_job_back_after_a_killed_rank(straight, tmp_path) -> None:
    folder = tmp_path / "run"
    argv = ["stall_the_first_time", "1", *TINY, *PP2, "--save", str(folder), "--save-interval", "1"]
    run = Torchrun(tmp_path / "torchrun", 2, "tests/faults/driver.py", *argv, restarts=1)
    run.kill_stalled()
    ended = run.end(60)
    assert ended.status == [0] and "continuing at iteration 1, 4 samples consumed" in ended.output[0]
    assert same(folder, straight)


def test_a_job_that_comes_back_with_another_number_of_ranks(straight, tmp_path) -> None:
    folder, job = tmp_path / "run", {"TORCHELASTIC_RUN_ID": "job-7"}
    argv = [*TINY, "--save", str(folder), "--save-interval", "1"]
    run = Ranks(tmp_path / "before", 2, *argv, *PP2, fault=("stall_in_step", 0), more=job)
    run.kill_stalled()
    run.end()
    ended = Ranks(tmp_path / "after", 3, *argv, *PP3, more=job).end(30)
    assert ended.status == [0, 0, 0] and "continuing at iteration 1, 4 samples consumed" in ended.output[0]
    assert "the job was here before" in ended.output[0] and same(folder, straight)
    done = (folder / "iter_0000004").stat()
    again = Ranks(tmp_path / "again", 1, *argv, more=job).end(30)
    assert again.status == [0] and "iteration 4 of 4 is reached already" in again.output[0]
    assert (folder / "iter_0000004").stat() == done


def test_what_another_run_left_is_not_mixed_with(straight, tmp_path) -> None:
    folder = tmp_path / "run"
    argv = [*TINY, "--save", str(folder)]
    assert Ranks(tmp_path / "first", 1, *argv).end(30).status == [0]
    refused(Ranks(tmp_path / "second", 2, *argv, *PP2).end(30), f"{folder} holds checkpoints", "--load", "--save")
    assert list_checkpoints(folder) == [4]
    assert same(folder, straight)
