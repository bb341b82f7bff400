"""A signal in an evaluation: all ranks leave it after the same batch, and a run saves what it has."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from megasnn.checkpoint.folder import list_checkpoints
from tests.faults.launch import PP2, TINY, Ended, Ranks

BATCHES = 60
SLOWEST = 0.2 * 2 * BATCHES  # seconds of a whole evaluation with the fault: two micro-batches in each batch
EVALUATES = (*TINY, "--eval-iters", str(BATCHES))
RUN = (*EVALUATES, "--train-iters", "4", "--eval-interval", "2", "--keep-best", "--ema-decay", "0.9")


def stopped(folder: Path, number: signal.Signals, rank: int, size: int, *flags: str) -> Ended:
    """A run that gets a signal in its first evaluation, of which it has done a batch."""
    ranks = Ranks(folder, size, *flags, fault=("slow_evaluation", rank))
    ranks.kill_stalled(number)
    return ranks.end(SLOWEST / 2)


def validations(output: str) -> list[str]:
    return re.findall("validation at iteration .*", output)


def test_the_run_is_saved_and_goes_on(tmp_path) -> None:
    folder, flags = tmp_path / "run", (*PP2, "--async-save")
    ended = stopped(tmp_path / "ranks", signal.SIGTERM, 0, 2, *RUN, *flags, "--save", str(folder))
    assert ended.status == [0, 0] and list_checkpoints(folder) == [2]
    assert not validations(ended.output[0])
    left = re.search(r"the evaluation at iteration 2 was left after (\d+) of 240 samples", ended.output[0])
    assert left is not None and 4 <= int(left[1]) < 120
    assert "asked to stop: the run ends at iteration 2 of 4" in ended.output[0]

    resumed = Ranks(tmp_path / "again", 2, *RUN, *flags, "--load", str(folder), "--save", str(folder)).end(60)
    assert resumed.status == [0, 0] and len(validations(resumed.output[0])) == 1  # that of iteration 4


def test_one_that_was_all_there_is_has_a_status_of_its_own(tmp_path) -> None:
    folder = tmp_path / "run"
    assert Ranks(tmp_path / "ranks", 1, *TINY, "--save", str(folder)).end(60).status == [0]
    only = ("--evaluate-only", "--load", str(folder))
    ended = stopped(tmp_path / "stopped", signal.SIGTERM, 1, 2, *EVALUATES, *PP2, *only)
    assert ended.status == [1, 143]
    assert "asked to stop: the evaluation at iteration 4 was left" in ended.output[0]
    assert not validations(ended.output[0]) and "Traceback" not in "".join(ended.output)
