"""The processes that read data: a lost one ends the run with a word, and none of them outlives its rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.faults.launch import TINY, TP2, Ranks, lines_of
from tests.faults.test_signals import ENDLESS, wait_for


def started(tmp_path: Path) -> Ranks:
    ranks = Ranks(tmp_path, 2, *TINY, *TP2, *ENDLESS, "--num-workers", "2")
    wait_for(ranks, "iteration      3/")
    return ranks


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def workers_of(rank: int) -> list[int]:
    """The template, and the workers that are copies of it."""
    (template,) = [
        child for child in children_of(rank) if b"megasnn.data.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return [template, *children_of(template)]


def all_gone(processes: list[int], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{process}").exists() for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_killed_worker_ends_the_run_and_is_named(tmp_path) -> None:
    ranks = started(tmp_path)
    processes = [worker for rank in ranks.processes for worker in workers_of(rank.pid)]
    assert len(processes) == 6
    lost = workers_of(ranks.processes[1].pid)[1]
    ranks.started = time.monotonic()
    os.kill(lost, signal.SIGKILL)
    ended = ranks.end(10)
    assert ended.status == [1, 1], ended.output
    (line,) = lines_of(1, ended.output[1])
    assert f"data worker {lost} was killed by SIGKILL; has memory run out? Lower --num-workers" in line
    assert not lines_of(0, ended.output[0]) and "Traceback" not in "".join(ended.output)
    assert all_gone(processes)


def test_no_worker_outlives_its_rank(tmp_path) -> None:
    """One rank is killed, the other one ended by its watch."""
    ranks = started(tmp_path)
    processes = [worker for rank in ranks.processes for worker in workers_of(rank.pid)]
    ranks.started = time.monotonic()
    os.kill(ranks.processes[0].pid, signal.SIGKILL)
    ended = ranks.end(10)
    assert ended.status == [-signal.SIGKILL, 1] and all_gone(processes)
