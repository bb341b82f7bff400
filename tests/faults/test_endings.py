"""Runs that end before their time: by a signal, which saves, in a step or in an evaluation, and since they diverge."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megasnn.checkpoint.folder import list_checkpoints
from tests.faults.launch import ENDLESS, PP2, TINY, TP2, Ended, Ranks


@pytest.mark.parametrize(
    ("number", "signalled", "flags"),
    [
        (signal.SIGTERM, [1], PP2),
        (signal.SIGUSR1, [0, 1], (*TP2, "--async-save", "--save-interval", "1")),  # as a launcher passes it on
    ],
)
def test_the_run_is_saved_and_ends_well(tmp_path, number, signalled, flags) -> None:
    folder = tmp_path / "run"
    ranks = Ranks(tmp_path / "ranks", 2, *TINY, *flags, *ENDLESS, "--save", str(folder))
    ranks.wait_for("iteration      3/")
    ranks.kill(number, *signalled)
    ended = ranks.end()
    assert ended.status == [0, 0]
    assert "Traceback" not in "".join(ended.output)
    reached = int(ended.output[0].split("asked to stop: the run ends at iteration ")[1].split()[0])
    assert list_checkpoints(folder)[-1] == reached


def test_a_signal_after_the_last_step_changes_nothing(tmp_path) -> None:
    """A scheduler would start a run again that ends with another status."""
    ranks = Ranks(tmp_path, 2, *TINY, *PP2, fault=("slow_end", 1))
    ranks.kill_stalled(signal.SIGTERM)
    ended = ranks.end()
    assert ended.status == [0, 0] and "Traceback" not in "".join(ended.output)


ENDED_RUN = """
import atexit, time
from megasnn.training.signals import StopSignals

def slowly():
    print("ending", flush=True)
    time.sleep(0.7)

atexit.register(slowly)
with StopSignals():
    pass
"""


def test_a_signal_to_a_program_whose_run_has_ended_changes_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDED_RUN], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None and program.stdout.readline() == "ending\n"
        program.send_signal(signal.SIGTERM)
    assert program.returncode == 0


def test_a_second_signal_ends_at_once(tmp_path) -> None:
    """In a step that does not end; a repetition within a second is the launcher's, and still the first one."""
    ranks = Ranks(tmp_path, 2, *TINY, *PP2, fault=("stall_in_step", 0))
    ranks.kill_stalled(signal.SIGINT)
    ranks.wait_for("once more ends it at once")
    ranks.kill(signal.SIGTERM, 0)
    time.sleep(1.2)
    assert all(process.is_alive() for process in ranks.processes)
    ranks.kill(signal.SIGTERM, 0)
    assert ranks.end(10).status == [128 + signal.SIGTERM, 1]


SECONDS = 0.2 * 2 * 60  # of a whole evaluation with the fault: of 60 batches, each of two micro-batches


def stopped(folder: Path, rank: int, *flags: str) -> Ended:
    """A run that gets SIGTERM in its first evaluation, of which it has done a batch: all leave it behind the same."""
    ranks = Ranks(folder, 2, *TINY, *PP2, "--eval-iters", "60", *flags, fault=("slow_evaluation", rank))
    ranks.kill_stalled(signal.SIGTERM)
    ended = ranks.end(SECONDS / 2)
    assert "validation at iteration" not in ended.output[0]
    return ended


def test_a_run_is_saved_and_an_evaluation_alone_has_a_status_of_its_own(tmp_path) -> None:
    folder = tmp_path / "run"
    flags = ("--eval-interval", "2", "--keep-best", "--ema-decay", "0.9", "--async-save", "--save", str(folder))
    ended = stopped(tmp_path / "ranks", 0, *flags)
    assert ended.status == [0, 0] and list_checkpoints(folder) == [2]
    left = re.search(r"the evaluation at iteration 2 was left after (\d+) of 240 samples", ended.output[0])
    assert left is not None and 4 <= int(left[1]) < 120
    assert "asked to stop: the run ends at iteration 2 of 4" in ended.output[0]

    ended = stopped(tmp_path / "again", 1, "--evaluate-only", "--load", str(folder))
    assert ended.status == [1, 143]
    assert "asked to stop: the evaluation at iteration 2 was left" in ended.output[0]
    assert "Traceback" not in "".join(ended.output)


def test_a_run_that_diverges_ends_with_a_status_of_its_own_and_keeps_its_checkpoints(tmp_path) -> None:
    """Its log names the layer where it began."""
    flags = ["--lr", "1e30", "--clip-grad", "0", "--lr-decay-style", "constant", "--train-iters", "20"]
    save = ["--save", str(tmp_path / "run"), "--save-interval", "1", "--keep-last", "2", "--max-skipped-steps", "4"]
    ended = Ranks(tmp_path / "ranks", 2, *TINY, *PP2, *flags, *save).end(40)
    assert ended.status == [4, 4], ended.output
    assert "--max-skipped-steps" in ended.output[0]
    assert re.search(r"not finite in (forward|backward), first in ", ended.output[0])
    steps = [line for line in ended.output[0].splitlines() if "loss:" in line]
    assert all("grad norm: nan" in line or "grad norm: inf" in line for line in steps[-4:])
    done = [number for number, line in enumerate(steps, start=1) if "skipped iterations" not in line]
    assert len(steps) == len(done) + 4 and done[-1] in list_checkpoints(tmp_path / "run")
