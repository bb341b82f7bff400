"""What users of a run met: neurons that learn from weights of neurons that do not, odd folders, runs that diverge."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megasnn.checkpoint.folder import list_checkpoints
from megasnn.checkpoint.format import read_metadata
from megasnn.checkpoint.load import load_global_tensors
from tests.training.runs import train

ONE = ("--train-iters", "1", "--eval-iters", "0")


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def test_time_constants_that_weights_do_not_have_start_from_tau(cache, tmp_path, capsys) -> None:
    train(cache, *ONE, "--save", str(tmp_path / "lif"))
    capsys.readouterr()
    learns = ("--neuron", "plif", "--tau", "3.0", "--finetune", "--load", str(tmp_path / "lif"))
    train(cache, *ONE, *learns, "--lr", "1e-12", "--save", str(tmp_path / "plif"))
    told = capsys.readouterr().out
    assert "neuron.w" in told and "--tau 3.0" in told
    found, before = load_global_tensors(tmp_path / "plif"), load_global_tensors(tmp_path / "lif")
    constants = {name for name in found if name.endswith(".w")}
    assert constants == found.keys() - before.keys()
    assert {round(found[name].item(), 5) for name in constants} == {round(-math.log(3.0 - 1.0), 5)}
    weights = "blocks.0.mlp.fc1.conv.weight"
    assert (found[weights] - before[weights]).abs().max() < 1e-9


def test_a_run_that_has_diverged_removes_no_good_checkpoint(cache, tmp_path) -> None:
    flags = ("--save-interval", "1", "--keep-last", "1", "--eval-iters", "0", "--save", str(tmp_path))
    train(cache, *flags, "--load", str(tmp_path), "--train-iters", "2")
    assert list_checkpoints(tmp_path) == [2]
    train(cache, *flags, "--load", str(tmp_path), "--train-iters", "8", "--lr", "1e30", "--clip-grad", "0")
    steps = list_checkpoints(tmp_path)
    skipped = {step: read_metadata(Path(tmp_path) / f"iter_{step:07d}").skipped_steps for step in steps}
    assert list(skipped)[-1] == 8 and skipped[8] and not skipped[list(skipped)[0]] and len(skipped) == 2
