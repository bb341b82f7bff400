"""A signal in an evaluation: all ranks leave it after the same batch, and a run saves what it has."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from megasnn.checkpoint.folder import list_checkpoints
from tests.faults.launch import PP2, TINY, Ended, Ranks

BATCHES = 60
SLOWEST = 0.2 * 2 * BATCHES  # seconds of a whole evaluation with the fault: two micro-batches in each batch
EVALUATES = (*TINY, *PP2, "--eval-iters", str(BATCHES))
RUN = ("--eval-interval", "2", "--keep-best", "--ema-decay", "0.9", "--async-save")


def stopped(folder: Path, rank: int, *flags: str) -> Ended:
    """A run that gets SIGTERM in its first evaluation, of which it has done a batch."""
    ranks = Ranks(folder, 2, *EVALUATES, *flags, fault=("slow_evaluation", rank))
    ranks.kill_stalled(signal.SIGTERM)
    ended = ranks.end(SLOWEST / 2)
    assert "validation at iteration" not in ended.output[0]
    return ended


def test_a_run_is_saved_and_an_evaluation_alone_has_a_status_of_its_own(tmp_path) -> None:
    folder = tmp_path / "run"
    ended = stopped(tmp_path / "ranks", 0, *RUN, "--save", str(folder))
    assert ended.status == [0, 0] and list_checkpoints(folder) == [2]
    left = re.search(r"the evaluation at iteration 2 was left after (\d+) of 240 samples", ended.output[0])
    assert left is not None and 4 <= int(left[1]) < 120
    assert "asked to stop: the run ends at iteration 2 of 4" in ended.output[0]

    ended = stopped(tmp_path / "again", 1, "--evaluate-only", "--load", str(folder))
    assert ended.status == [1, 143]
    assert "asked to stop: the evaluation at iteration 2 was left" in ended.output[0]
    assert "Traceback" not in "".join(ended.output)
