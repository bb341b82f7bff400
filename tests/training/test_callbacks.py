"""Events that a run gives to callbacks, and traces of some iterations: errors of neither end it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import megasnn
from megasnn.checkpoint.folder import list_checkpoints
from megasnn.config import parse
from megasnn.models.build import describe_model
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer
from tests.small_disk import fill, small_disk
from tests.training.runs import TINY, log_of, train, without_trial

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
    assert texts[-1] == f"to go on, give the same command with --load {folder} --save {folder}"
    assert sum(text.startswith("first step, iteration 1: loss ") for text in texts) == 1


TRACED = "--train-iters 4 --log-interval 2 --eval-iters 0".split()
ZBV = "--pipeline-model-parallel-size 2 --pipeline-schedule zbv --pipeline-model-parallel-layout 2|2|2|2".split()


def ranges(path: Path) -> set[str]:
    """The names that code has given to what ran, in a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def test_a_trace_names_actions_and_layers_and_changes_no_bit(ranks, cache, tmp_path) -> None:
    folder = tmp_path / "run"
    plain = ranks(2, train, cache, *TRACED, *ZBV)[0].tensors
    asked = ("--profile-step", "3", "--tensorboard-dir", str(folder))
    found = ranks(2, train, cache, *TRACED, *ZBV, *asked)[0].tensors
    assert all(torch.equal(one, plain[name]) for name, one in found.items())
    files = [f"rank{rank}-3.pt.trace.json" for rank in range(2)]
    assert sorted(path.name for path in (folder / "traces").iterdir()) == files
    first, second = (ranges(folder / "traces" / file) for file in files)
    for micro in range(3):  # the first rank has chunks 0 and 3, the second one 1 and 2
        assert {f"{kind}{micro}" for kind in ("0F", "0I", "0W", "0SEND_F", "0RECV_B", "3F", "3RECV_F")} <= first
        assert {f"{kind}{micro}" for kind in ("1F", "1I", "1W", "1RECV_F", "2F", "2SEND_F", "1SEND_B")} <= second
    config = parse(run_config(Spikformer), list(TINY))
    layers = [each.name for each in describe_model(config.model, config.neuron.spec).layers]
    assert [name in first for name in layers] == [name not in second for name in layers]
    assert layers[0] in first and layers[-1] in first and layers[3] in second
    events = EventAccumulator(str(folder)).Reload()
    assert [image.step for image in events.Images("pipeline/simulated")] == [0], "at the start"


def test_what_cannot_be_reported_ends_no_run(cache, tmp_path, capfd) -> None:
    """TensorBoard's files, pictures and the trace on a full disk."""
    flags = "--train-iters 2 --eval-iters 0 --profile-step 1".split()
    with small_disk(tmp_path / "disk", "64k") as disk, without_trial():
        fill(disk)
        folders = ("--tensorboard-dir", str(disk / "board"), "--save", str(tmp_path / "run"))
        outcome = train(cache, *flags, *folders)
    told = [line for line in capfd.readouterr().out.splitlines() if "WARNING" in line]
    assert outcome.iteration == 2 and list_checkpoints(tmp_path / "run") == [2]
    assert len(told) == len({line.split(" failed")[0] for line in told}) and all(str(disk) in line for line in told)
    assert told and all("No space left on device" in line for line in told), told
