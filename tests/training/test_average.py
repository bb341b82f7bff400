"""The running average of the weights, the length of a run in epochs, its evaluations, and the best checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megasnn.checkpoint.exchange import export_weights
from megasnn.checkpoint.folder import list_checkpoints
from megasnn.checkpoint.format import read_metadata
from megasnn.checkpoint.load import load_global_tensors
from megasnn.checkpoint.source import open_source
from megasnn.common.files import CheckpointError
from megasnn.config import TrainingConfig
from megasnn.engine.model import DistributedModel
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


BEST = "best_checkpointed_iteration.txt"


def test_epochs_in_iterations() -> None:
    training = TrainingConfig(train_epochs=3, micro_batch_size=4, global_batch_size=8)
    length = training.length(20)
    assert (length.iterations, length.epoch, length.epochs) == (7, 2.5, 2.8), "only whole batches"
    assert training.length(16).iterations == 6
    with pytest.raises(ValueError, match="--train-epochs 3 of 2 training samples is less than one --glob"):
        training.length(2)
    alone = TrainingConfig(evaluate_only=True, micro_batch_size=4, global_batch_size=8)
    assert alone.length(20).iterations == 0


def test_a_run_that_only_evaluates(ranks, cache, tmp_path) -> None:
    """It finds what the run that trained found, on any layout and with other data, and changes nothing."""
    folder, flags = str(tmp_path / "run"), ("--precision", "fp64", "--loss", "mse")
    train(cache, "--train-iters", "3", *flags, "--save", folder)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    again = (*flags, "--load", folder, "--evaluate-only", "--seed", "5", "--tensorboard-dir", str(tmp_path / "again"))
    for size, layout in ((1, ""), (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")):
        outcomes = ranks(size, train, cache, *again, *layout.split())
        assert {outcome.iteration for outcome in outcomes} == {3}
    assert [entry["iterations"] for entry in log_of(tmp_path / "run", "start")] == [3]  # the scripts read it
    expected, *found = [line for name in ("run", "again") for line in log_of(tmp_path / name, "validation")]
    assert len(found) == 2
    for each in found:
        assert each["loss"] == pytest.approx(expected["loss"], rel=1e-9) and each["top1"] == expected["top1"]
        assert (each["iteration"], each["samples"]) == (3, expected["samples"])
        assert each["validation/energy_mj"] == pytest.approx(expected["validation/energy_mj"], rel=1e-9)
        assert each["layers"].keys() == expected["layers"].keys() > {"patch_embed.stages.0.conv", "head"}
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert after == before
    # In the folder of the run itself, its configuration stays.
    train(cache, *flags, "--load", str(tmp_path / "run/iter_0000003"), "--evaluate-only", "--tensorboard-dir", folder)
    assert (tmp_path / "run/config.json").read_bytes() == before[tmp_path / "run/config.json"]
    assert json.loads((tmp_path / "run/evaluation_config.json").read_text())["training"]["evaluate_only"]
    with pytest.raises(CheckpointError, match="holds no average of the weights to evaluate: leave --ema-decay out"):
        train(cache, *again, "--ema-decay", "0.9")


def accuracies(monkeypatch, *values: float) -> None:
    """Evaluations find these shares of right answers, one after the other."""
    monkeypatch.undo()
    coming = iter(values)
    total = DistributedModel.of_all_replicas

    def found(model: DistributedModel, sums: torch.Tensor) -> torch.Tensor:
        found = total(model, sums)
        found[2] = next(coming) * found[1]
        return found

    monkeypatch.setattr(DistributedModel, "of_all_replicas", found)


def test_the_best_checkpoint_stays(cache, tmp_path, monkeypatch) -> None:
    accuracies(monkeypatch, 0.2, 0.5, 0.4, 0.5, 0.3, 0.1)
    common = ("--eval-interval", "1", "--save", str(tmp_path), "--load", str(tmp_path), "--keep-best")
    train(cache, "--train-iters", "9", "--exit-interval", "3", "--keep-last", "1", *common)
    assert (tmp_path / BEST).read_text() == "2\n" and list_checkpoints(tmp_path) == [2, 3]
    assert read_metadata(tmp_path / "iter_0000003").extra["best"] == {"iteration": 2, "accuracy_top1": 0.5}
    # The run goes on: what it knew counts, and something better takes the place.
    accuracies(monkeypatch, 0.5, 0.6, 0.6, 0.6)
    train(cache, "--train-iters", "9", "--exit-interval", "6", "--keep-last", "1", *common)
    assert (tmp_path / BEST).read_text() == "5\n" and list_checkpoints(tmp_path) == [5, 6]
