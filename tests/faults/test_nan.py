"""A nan is shown in the log line, and the layer where it appeared first is named."""

from __future__ import annotations

import re

from megasnn.checkpoint.folder import list_checkpoints
from tests.faults.launch import PP2, PP3, TINY, Ranks


def test_an_injected_nan(tmp_path) -> None:
    """In the middle stage of three, where its neurons hide it from the loss."""
    ended = Ranks(tmp_path, 3, *TINY, *PP3, fault=("nan_in_the_weights", 1)).end(30)
    assert ended.status == [0] * 3
    text = ended.output[0]
    lines = [line for line in text.splitlines() if " iteration " in line and "loss:" in line]
    assert len(lines) == 4
    assert [("grad norm: nan" in line) for line in lines] == [False, False, True, True]
    assert "number of skipped iterations" not in lines[1] and "number of skipped iterations: 1" in lines[3]
    assert re.search(r"not finite in forward, first in blocks\.0\.attention\.projection\.conv: \d+ nan", text), text


def test_a_run_that_diverges_ends_with_a_status_of_its_own_and_keeps_its_checkpoints(tmp_path) -> None:
    flags = ["--lr", "1e30", "--clip-grad", "0", "--lr-decay-style", "constant", "--train-iters", "20"]
    save = ["--save", str(tmp_path / "run"), "--save-interval", "1", "--keep-last", "2", "--max-skipped-steps", "4"]
    ended = Ranks(tmp_path / "ranks", 2, *TINY, *PP2, *flags, *save).end(40)
    assert ended.status == [4, 4], ended.output
    assert "--max-skipped-steps" in ended.output[0]
    assert re.search(r"not finite in (forward|backward), first in ", ended.output[0])
    steps = [line for line in ended.output[0].splitlines() if "loss:" in line]
    done = [number for number, line in enumerate(steps, start=1) if "skipped iterations" not in line]
    assert len(steps) == len(done) + 4 and done[-1] in list_checkpoints(tmp_path / "run")
