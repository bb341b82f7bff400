"""What a test starts ends with it, also when the test fails and nobody waits for its ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.launch import PP2, TINY, Ranks, Torchrun, kill_all, wait_for_pid


def runs(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False
    return "State:\tZ" not in status  # ended, and its parent has not asked for its status yet


def without_launcher(folder: Path) -> Ranks:
    return Ranks(folder, 2, *TINY, *PP2, fault=("stall_in_step", 1))


def under_torchrun(folder: Path) -> Torchrun:
    return Torchrun(folder, 2, "tests/faults/driver.py", "stall_in_step", "1", *TINY, *PP2)


@pytest.mark.parametrize("start", [without_launcher, pytest.param(under_torchrun, marks=pytest.mark.matrix)])
def test_ranks_that_stall_are_killed(tmp_path, start) -> None:
    run = start(tmp_path)
    stalled = wait_for_pid(run.pid_file, lambda: True, run.output)
    assert runs(stalled)
    kill_all()
    deadline = time.monotonic() + 5
    while runs(stalled):
        assert time.monotonic() < deadline, f"process {stalled} is still there"
        time.sleep(0.05)
