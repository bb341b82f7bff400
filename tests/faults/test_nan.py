"""A run that diverges: its log shows that, names the layer where it began, and the run ends."""

from __future__ import annotations

import re

from megasnn.checkpoint.folder import list_checkpoints
from tests.faults.launch import PP2, TINY, Ranks


def test_a_run_that_diverges_ends_with_a_status_of_its_own_and_keeps_its_checkpoints(tmp_path) -> None:
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
