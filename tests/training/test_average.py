"""The running average of the weights, the length of a run in epochs, its evaluations, and the best checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megasnn import Engine
from megasnn.checkpoint.exchange import export_weights
from megasnn.checkpoint.folder import list_checkpoints
from megasnn.checkpoint.format import read_metadata
from megasnn.checkpoint.load import load_global_tensors
from megasnn.checkpoint.source import open_source
from megasnn.checkpoint.weight_file import read_state_dict
from megasnn.commands.convert_checkpoint import main as convert
from megasnn.common.files import CheckpointError
from megasnn.config import ConfigError, OptimizerConfig, TrainingConfig, parse
from megasnn.engine.model import DistributedModel
from megasnn.export.trained_model import load_model
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer
from megasnn.optim.average import WeightAverage
from megasnn.parallel.sharding import Shard, ShardedTensor
from megasnn.training.data import length_for
from tests.engine.test_engine import MODEL, SIZES
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
        decay = min(0.75, step / (9 + step))  # it warms up
        for name, value in now.items():
            averaged = decay * expected[name] + (1 - decay) * value
            expected[name] = averaged if value.is_floating_point() else value
        found = averages(tmp_path, step)
        assert found.keys() == now.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14, msg=f"{name} in step {step}")
    assert not torch.equal(found["head.weight"], now["head.weight"])


def test_a_short_run_is_not_its_initial_values() -> None:
    """0.9999 ** 78 is 0.992: without a warm-up of the decay the average was 99 % of the initial values."""
    weight = torch.zeros(3)
    average = WeightAverage([ShardedTensor("w", weight, Shard((3,)), True)], 0.9999)
    weight += 1
    for _ in range(78):
        average.update()
    assert average.tensors[0].tensor.min() > 0.999
    average.steps = 10**5  # then it is the one that was asked for
    before = average.tensors[0].tensor.clone()
    weight += 1
    average.update()
    torch.testing.assert_close(average.tensors[0].tensor - before, (weight - before) * 1e-4, rtol=0, atol=1e-6)


def test_its_warm_up_goes_on_where_it_was(cache, tmp_path) -> None:
    flags = (*COMMON, "--ema-decay", "0.75", "--save")
    train(cache, *flags, str(tmp_path / "whole"))
    parts = str(tmp_path / "parts")
    train(cache, *flags, parts, "--exit-interval", "2")
    train(cache, *flags, parts, "--load", parts)
    whole, found = averages(tmp_path / "whole"), averages(tmp_path / "parts")
    assert whole and all(torch.equal(value, found[name]) for name, value in whole.items())
    # It begins with the step from which it is kept.
    train(cache, "--train-iters", "3", "--eval-iters", "0", "--save", str(tmp_path / "later"))
    later = ("--load", str(tmp_path / "later"), "--save", str(tmp_path / "later"))
    train(cache, "--train-iters", "4", "--eval-iters", "0", "--ema-decay", "0.75", *later)
    assert read_metadata(tmp_path / "later/iter_0000004").extra["averaged_steps"] == 1


def test_every_door_takes_it_unless_told_otherwise(cache, tmp_path, capsys) -> None:
    folder = tmp_path / "run"
    train(cache, *COMMON, "--ema-decay", "0.75", "--save", str(folder))
    weights, average = load_global_tensors(folder), averages(folder)
    for more, expected, said in (
        ((), average, "takes the average of the weights (--no-ema: the weights) of"),
        (("--no-ema",), weights, f"takes the weights of {folder}/iter_0000004"),
    ):
        start = ("--train-iters", "9", "--load", str(folder), *more)
        taken = train(cache, *start, "--finetune", only_load=True).tensors
        assert all(torch.equal(value, taken[name]) for name, value in expected.items())
        assert f"--finetune {said}" in capsys.readouterr().out
        taken = train(cache, *start, "--evaluate-only", only_load=True).tensors
        assert all(torch.equal(value, taken[name]) for name, value in expected.items())
        taken = load_model(folder, ema=not more).state()
        assert all(torch.equal(value, taken[name]) for name, value in expected.items())
        with Engine(MODEL, **SIZES) as engine:
            engine.load(folder, weights_only=True, ema=not more)
            taken = engine.state_dict()
        assert all(torch.equal(value, taken[name]) for name, value in expected.items())
        command = ["export", "--load", str(folder), "--output", str(tmp_path / f"{len(more)}.pt"), *more]
        assert convert(command + ["--names", "megasnn"]) == 0
        taken = read_state_dict(tmp_path / f"{len(more)}.pt")
        assert all(torch.equal(value, taken[name]) for name, value in expected.items())
    with pytest.raises(ConfigError, match="--no-ema is for --evaluate-only, --finetune and weight files"):
        train(cache, *COMMON, "--no-ema")


def test_with_and_without_it(cache, tmp_path, capsys) -> None:
    train(cache, *COMMON, "--exit-interval", "1", "--save", str(tmp_path / "run"))
    weights = load_global_tensors(tmp_path / "run")
    folders = ("--load", str(tmp_path / "run"), "--save", str(tmp_path / "run"))
    train(cache, *COMMON, *folders, "--exit-interval", "2", "--ema-decay", "0.75")
    assert "--ema-decay from 0.0 to 0.75" in capsys.readouterr().out
    now, found = load_global_tensors(tmp_path / "run"), averages(tmp_path / "run")
    expected = 0.1 * weights["head.weight"] + 0.9 * now["head.weight"]
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
    train(cache, *again, "--tensorboard-dir", str(tmp_path / "average"))
    train(cache, *again, "--tensorboard-dir", str(tmp_path / "weights"), "--no-ema")
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
    assert (length.left_over, training.length(16).left_over) == (4, 0)
    samples = TrainingConfig(train_samples=50, micro_batch_size=4, global_batch_size=8)
    assert (samples.length(20).iterations, samples.length(20).left_over) == (6, 2)
    assert samples.length(20, iteration=2, consumed_samples=32).iterations == 4
    with pytest.raises(ValueError, match="--train-samples 7 is less than one --global-batch-size 8"):
        replace(samples, train_samples=7).length(20)
    alone = TrainingConfig(evaluate_only=True, micro_batch_size=4, global_batch_size=8)
    assert alone.length(20).iterations == 0


def test_all_sizes_that_do_not_fit_the_data_are_told_at_once() -> None:
    sizes = "--global-batch-size 128 --micro-batch-size 64 --train-samples 100 --last-batch drop"
    config = parse(run_config(Spikformer), sizes.split())
    with pytest.raises(ConfigError) as told:
        length_for(config, 24, "drop", 2)
    dropped, micro_batch, length = told.value.problems
    assert "none of the 24" in dropped and "lower it to 24" in dropped
    assert "--micro-batch-size 64" in micro_batch and "to 12 or less" in micro_batch
    assert "--train-samples 100 is less than" in length
    longer = parse(run_config(Spikformer), [*sizes.split(), "--train-samples", "256"])
    assert length_for(longer, 24, "continue", 2).iterations == 2


def test_an_evaluation_of_few_samples_leaves_none_out(cache, tmp_path: Path) -> None:
    """The recipe's batch is for training, and so is its --last-batch."""
    folder = str(tmp_path / "run")
    train(cache, "--train-iters", "1", "--save", folder, "--eval-iters", "0")
    evaluate = "--evaluate-only --global-batch-size 2000 --last-batch drop --num-workers 0"
    ended = train(cache, "--load", folder, *evaluate.split())
    assert ended.iteration == 1


@pytest.mark.parametrize("length", [("--train-epochs", "1"), ("--train-samples", "1442")])
def test_epochs_are_counted_in_samples_whatever_the_batch_was(cache, tmp_path, capsys, length) -> None:
    """An epoch, of which 4 batches of 160 are done and the rest is in batches of 80; the rate goes on where it was."""
    folder = ("--save", str(tmp_path), "--eval-iters", "0", *length, "--log-interval", "1")
    train(cache, *folder, "--global-batch-size", "160", "--exit-interval", "4")
    ended = train(cache, *folder, "--global-batch-size", "80", "--load", str(tmp_path))
    printed = capsys.readouterr().out
    assert "left out at the end: 2 samples, too few" in printed
    (first, second), lines = log_of(tmp_path, "start"), log_of(tmp_path, "iteration")
    samples = 1442  # of the digits to train on
    assert first["iterations"] == samples // 160 == 9
    assert second["iterations"] == ended.iteration == 4 + (samples - 640) // 80 == 14
    assert ended.consumed_samples == 640 + 10 * 80
    rates = {line["iteration"]: line["learning_rate"] for line in lines}
    config = OptimizerConfig(lr=1e-2)
    for iteration, done in ((4, 3 / 9), (5, 8 / 18), (14, 17 / 18)):
        assert rates[iteration] == pytest.approx(0.5 * config.lr * (1 + math.cos(math.pi * done)))


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


def accuracies(monkeypatch, *values: float) -> None:
    """Evaluations find these shares of right answers, one after the other."""
    monkeypatch.undo()
    coming = iter(values)
    total = DistributedModel.sum_over_replicas

    def found(model: DistributedModel, sums: torch.Tensor) -> torch.Tensor:
        found = total(model, sums)
        found[2] = next(coming) * found[1]
        return found

    monkeypatch.setattr(DistributedModel, "sum_over_replicas", found)


def test_the_best_checkpoint_stays(cache, tmp_path, monkeypatch) -> None:
    accuracies(monkeypatch, 0.2, 0.5, 0.4, 0.5, 0.3, 0.1)
    common = ("--eval-interval", "1", "--save", str(tmp_path), "--load", str(tmp_path), "--keep-best")
    train(cache, "--train-iters", "9", "--exit-interval", "3", "--keep-last", "1", *common)
    assert (tmp_path / BEST).read_text() == "2\n" and list_checkpoints(tmp_path) == [2, 3]
    best = read_metadata(tmp_path / "iter_0000003").extra["best"]
    assert (best["iteration"], best["accuracy_top1"], best["evaluation"]["samples"]) == (2, 0.5, 20)
    # The run goes on: what it knew counts, and something better takes the place.
    accuracies(monkeypatch, 0.5, 0.6, 0.6, 0.6)
    train(cache, "--train-iters", "9", "--exit-interval", "6", "--keep-last", "1", *common)
    assert (tmp_path / BEST).read_text() == "5\n" and list_checkpoints(tmp_path) == [5, 6]


def test_the_best_after_going_back_is_the_best_until_there(cache, tmp_path, monkeypatch) -> None:
    """After going back, the best is that until there; checkpoints given up are neither named nor kept."""
    common = ("--eval-interval", "1", "--save-interval", "1", "--save", str(tmp_path), "--load", str(tmp_path))
    common = (*common, "--train-iters", "9", "--keep-best")
    accuracies(monkeypatch, 0.2, 0.5, 0.4, 0.9)
    train(cache, *common, "--exit-interval", "4")
    assert (tmp_path / BEST).read_text() == "4\n"
    accuracies(monkeypatch, 0.3, 0.1, 0.1, 0.1)
    train(cache, *common, "--ckpt-step", "3", "--exit-interval", "7", "--keep-last", "1")
    assert (tmp_path / BEST).read_text() == "2\n" and list_checkpoints(tmp_path) == [2, 7]
    train(cache, *common, "--ckpt-step", "2", only_load=True)
    (tmp_path / BEST).write_text("9\n")
    (tmp_path / "iter_0000002").rename(tmp_path / "first")
    shutil.copytree(tmp_path / "iter_0000007.given_up", tmp_path / "iter_0000007")
    train(cache, *common, "--ckpt-step", "7", only_load=True)
    assert not (tmp_path / BEST).exists(), "its checkpoint is gone"


@pytest.mark.parametrize(("flags", "changed"), [(("--eval-iters", "1"), "samples"), (("--center-crop", "0.8"), "crop")])
def test_a_best_is_not_compared_with_another_evaluation(cache, tmp_path, monkeypatch, capsys, flags, changed) -> None:
    common = ("--eval-interval", "1", "--save", str(tmp_path), "--load", str(tmp_path), "--keep-best")
    common = (*common, "--train-iters", "9")
    accuracies(monkeypatch, 0.9, 0.8)
    train(cache, *common, "--exit-interval", "2")
    accuracies(monkeypatch, 0.3, 0.2)
    train(cache, *common, *flags, "--exit-interval", "4")
    told = capsys.readouterr().out
    assert "of iteration 1 with 90.00%, was found by another evaluation" in told and changed in told
    assert (tmp_path / BEST).read_text() == "3\n"
