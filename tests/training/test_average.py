"""The running average of the weights: what it is, evaluated and saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megasnn.checkpoint.load import load_global_tensors
from megasnn.convert.exchange import export_weights
from megasnn.convert.source import open_source
from megasnn.files import CheckpointError
from tests.training.runs import log_of, train

COMMON = ("--train-iters", "4", "--eval-iters", "0")


def averages(folder: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    saved = load_global_tensors(folder, step, with_optimizer=True)
    return {name[4:]: value for name, value in saved.items() if name.startswith("ema.")}


def test_it_is_the_average_of_the_weights_and_statistics(cache, tmp_path) -> None:
    flags = (*COMMON, "--precision", "fp64", "--ema-decay", "0.75")
    expected = train(cache, *flags, only_load=True).tensors
    train(cache, *flags, "--save", str(tmp_path), "--save-interval", "1")
    for step in range(1, 5):
        now = load_global_tensors(tmp_path, step)
        for name, value in now.items():
            expected[name] = 0.75 * expected[name] + 0.25 * value if value.is_floating_point() else value
        found = averages(tmp_path, step)
        assert found.keys() == now.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14, msg=f"{name} in step {step}")
    assert not torch.equal(found["head.weight"], now["head.weight"])


def test_with_and_without_it(cache, tmp_path, capsys) -> None:
    train(cache, *COMMON, "--exit-interval", "1", "--save", str(tmp_path / "run"))
    weights = load_global_tensors(tmp_path / "run")
    folders = ("--load", str(tmp_path / "run"), "--save", str(tmp_path / "run"))
    train(cache, *COMMON, *folders, "--exit-interval", "2", "--ema-decay", "0.75")
    assert "--ema-decay from 0.0 to 0.75" in capsys.readouterr().out
    now, found = load_global_tensors(tmp_path / "run"), averages(tmp_path / "run")
    expected = 0.75 * weights["head.weight"] + 0.25 * now["head.weight"]
    torch.testing.assert_close(found["head.weight"], expected, rtol=1e-6, atol=1e-7)
    assert train(cache, *COMMON, *folders).iteration == 4
    assert not averages(tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds no average of the weights: the run had no --ema-decay"):
        export_weights(open_source(tmp_path / "run"), tmp_path / "out.pt", "spikingjelly", averaged=True)


def test_it_is_what_is_evaluated(ranks, cache, tmp_path) -> None:
    """Once in the run that trains, once in one that starts from what was exported."""
    flags = ("--train-iters", "3", "--precision", "fp64", "--ema-decay", "0.5")
    ranks(2, train, cache, *flags, "--save", str(tmp_path / "run"), "--tensor-model-parallel-size", "2")
    export_weights(open_source(tmp_path / "run"), tmp_path / "out.pt", "spikingjelly", averaged=True)
    start = ("--load", str(tmp_path / "out.pt"), "--evaluate-only", "--precision", "fp64")
    train(cache, *start, "--tensorboard-dir", str(tmp_path / "exported"))
    again = ("--load", str(tmp_path / "run"), "--evaluate-only", "--precision", "fp64")
    train(cache, *again, "--tensorboard-dir", str(tmp_path / "average"), "--ema-decay", "0.5")
    train(cache, *again, "--tensorboard-dir", str(tmp_path / "weights"))
    for name, what in (("average", "average of the weights"), ("weights", "weights")):
        assert f"evaluating the {what} of iteration 3" in (tmp_path / name / "log.jsonl").read_text()
    found = [log_of(tmp_path / name, "validation") for name in ("run", "exported", "average", "weights")]
    (run,), (exported,), (average,), (weights,) = ([line["loss"] for line in each] for each in found)
    assert run == pytest.approx(exported, rel=1e-9) == pytest.approx(average, rel=1e-9)
    assert run != pytest.approx(weights, rel=1e-6)
