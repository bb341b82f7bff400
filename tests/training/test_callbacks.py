"""What a run tells callbacks: their errors do not end it, and what asks for its end ends it as a signal does."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

import megasnn
from megasnn.checkpoint.folder import list_checkpoints
from tests.training.runs import log_of, train, without_trial

FLAGS = ("--train-iters", "4", "--eval-interval", "2", "--eval-iters", "1", "--log-interval", "2")


class Failing(megasnn.Callback):
    def step(self, iteration: int, result: Any) -> None:
        if iteration != 3:
            raise OSError("no tracker there")


def test_callbacks_are_told_what_the_log_has(cache, tmp_path, capfd) -> None:
    kept = mock.Mock(spec=megasnn.Callback)
    with without_trial():
        train(cache, *FLAGS, "--save", str(tmp_path / "run"), callbacks=[Failing(), kept])
    names = [name for name, *_ in kept.method_calls]
    first, second = ["step", "step", "log", "evaluation"], ["step", "step", "log", "evaluation", "save", "end"]
    assert names == ["start", *first, *second]
    told = [values for _, values, _ in kept.method_calls]
    outline, flags = told[0]
    assert outline.iterations == 4 and flags["lr"] == 1e-2 and flags["data_parallel_size"] == 1
    (iteration, step), (record, scalars), (evaluation,) = told[2:5]
    assert iteration == 2 == record.iteration == evaluation.iteration
    assert record.loss == scalars["training/loss"] == (told[1][1].loss + step.loss) / 2
    assert "spikes/firing_rate" in scalars and 0 <= evaluation.top1 <= 1
    assert told[-2] == (4, tmp_path / "run" / "iter_0000004") and told[-1] == (4,)
    told_of_failing = [line for line in capfd.readouterr().out.splitlines() if "Failing.step" in line]
    assert len(told_of_failing) == 1
    assert "WARNING: Failing.step failed (OSError: no tracker there); training goes on" in told_of_failing[0]


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(ValueError, match="megasnn.Callback"):
        megasnn.pretrain("spikformer", ["--train-iters", "1"], callbacks=[Ending])  # type: ignore[list-item]


class Ending(megasnn.Callback):
    def step(self, iteration: int, result: Any) -> None:
        if iteration == 2:
            raise SystemExit


def test_a_callback_that_exits_ends_the_run_as_a_signal_does(cache, tmp_path) -> None:
    """After the next step, saved and not evaluated."""
    kept, folder = mock.Mock(spec=megasnn.Callback), tmp_path / "run"
    with without_trial():
        outcome = train(cache, "--train-iters", "9", "--save", str(folder), callbacks=[Ending(), kept])
    assert outcome.iteration == 3 and list_checkpoints(folder) == [3]
    assert [name for name, *_ in kept.method_calls] == ["start", "step", "step", "step", "save", "end"]
    texts = [line["text"] for line in log_of(folder, "message")]
    assert "Ending.step asks for the end of the run (SystemExit), as a signal does" in texts
    assert "asked to stop: the run ends at iteration 3 of 9" in texts
