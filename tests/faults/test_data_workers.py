"""The processes that read data: a lost one ends the run with a word, and none of them outlives its rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.data.test_workers import all_end
from tests.faults.launch import TINY, TP2, Ranks, lines_of
from tests.faults.test_signals import ENDLESS, wait_for


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def workers_of(rank: int) -> list[int]:
    """The process that is copied, and the workers that are copies of it."""
    (template,) = [child for child in children_of(rank) if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return [template, *children_of(template)]


def test_a_lost_worker_ends_the_run_and_is_named(tmp_path) -> None:
    ranks = Ranks(tmp_path, 2, *TINY, *TP2, *ENDLESS, "--num-workers", "2")
    wait_for(ranks, "iteration      3/")
    processes = [worker for rank in ranks.processes for worker in workers_of(rank.pid)]
    assert len(processes) == 6
    lost = workers_of(ranks.processes[1].pid)[1]
    ranks.started = time.monotonic()
    os.kill(lost, signal.SIGKILL)
    ended = ranks.end(40)
    assert ended.status == [1, 1], ended.output
    (line,) = lines_of(1, ended.output[1])
    assert str(lost) in line and not lines_of(0, ended.output[0])
    assert "Traceback" not in "".join(ended.output) and all_end(processes)
