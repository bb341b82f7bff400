"""SIGTERM, SIGINT and SIGUSR1 to any rank: all save at the end of the step and end; a second one ends at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megasnn.checkpoint.folder import list_checkpoints
from tests.faults.launch import PP2, TINY, TP2, Ended, Ranks, Torchrun

ENDLESS = ("--train-iters", "100000", "--log-interval", "1")


def wait_for(ranks: Ranks | Torchrun, text: str, seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while text not in (output := ranks.output()):
        assert time.monotonic() < deadline, f"{text!r} did not appear:\n{output}"
        time.sleep(0.02)


def ended_after(ranks: Ranks, rank: int, number: signal.Signals, within: float = 15.0) -> Ended:
    wait_for(ranks, "iteration      3/")
    ranks.started = time.monotonic()
    os.kill(ranks.processes[rank].pid, number)
    return ranks.end(within)


@pytest.mark.parametrize(
    ("number", "rank", "flags"),
    [
        (signal.SIGTERM, 1, PP2),
        (signal.SIGUSR1, 1, (*TP2, "--async-save", "--save-interval", "1")),
    ],
)
def test_the_run_is_saved_and_ends_well(tmp_path, number, rank, flags) -> None:
    folder = tmp_path / "run"
    ranks = Ranks(tmp_path / "ranks", 2, *TINY, *flags, *ENDLESS, "--save", str(folder))
    ended = ended_after(ranks, rank, number)
    assert ended.status == [0, 0]
    assert "Traceback" not in ended.output[rank] and "asked to stop: the run ends at iteration" in ended.output[0]
    reached = int(ended.output[0].split("the run ends at iteration ")[1].split()[0])
    assert list_checkpoints(folder)[-1] == reached
    resumed = Ranks(tmp_path / "again", 1, *TINY, "--load", str(folder), "--train-iters", str(reached + 1)).end(30)
    assert resumed.status == [0] and f"continuing at iteration {reached}," in resumed.output[0]


def test_a_second_signal_ends_at_once(tmp_path) -> None:
    """In a step that does not end; a repetition within a second is the launcher's, and still the first one."""
    ranks = Ranks(tmp_path, 2, *TINY, *PP2, fault=("stall_in_step", 0))
    ranks.kill_stalled(signal.SIGINT)
    wait_for(ranks, "once more ends it at once")
    os.kill(ranks.processes[0].pid, signal.SIGTERM)
    time.sleep(1.2)
    assert all(process.is_alive() for process in ranks.processes)
    os.kill(ranks.processes[0].pid, signal.SIGTERM)
    assert ranks.end(10).status == [128 + signal.SIGTERM, 1]


def test_before_training_there_is_nothing_to_save(tmp_path) -> None:
    ranks = Ranks(tmp_path, 2, *TINY, *PP2, fault=("leave_before_joining", 1))
    ranks.processes[1].join(30)
    ranks.started = time.monotonic()
    os.kill(ranks.processes[0].pid, signal.SIGTERM)
    assert ranks.end(10).status == [-signal.SIGTERM, 0]


def test_under_torchrun(tmp_path: Path) -> None:
    """It passes SIGTERM on to all ranks, and gives them time."""
    run = Torchrun(tmp_path, 2, "pretrain_spikformer.py", *TINY, *TP2, *ENDLESS, "--save", str(tmp_path / "run"))
    wait_for(run, "iteration      3/")
    os.kill(run.process.pid, signal.SIGTERM)
    run.started = time.monotonic()
    ended = run.end(20)
    assert f"saved {tmp_path / 'run'}" in ended.output[0]
    assert len(list_checkpoints(tmp_path / "run")) == 1
