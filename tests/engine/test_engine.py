"""The Engine from Python: what the command line computes, bit for bit, on any layout; and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megasnn
from megasnn import ConvNormNeuron, Engine, MeanLinear, Model, layer
from megasnn.checkpoint import load_global_tensors
from megasnn.config import ConfigError, DataConfig
from megasnn.data import BatchLoader, LoaderOptions, Share, open_datasets
from megasnn.models.layer import Layer
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.parallel_state import model_parallel_is_initialized
from megasnn.preprocess.sample import shards_of_sample
from tests.models.networks import Tied
from tests.training.runs import train, without_trial

MODEL = Spikformer(
    image_size=8, in_channels=1, num_classes=10, patch_size=4, embed_dim=32, depth=1, num_heads=4, time_steps=2,
    mlp_ratio=2,
)  # fmt: skip
SIZES = {"micro_batch_size": 4, "global_batch_size": 10, "train_iters": 3, "lr": 1e-2}
PP2 = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "3|5", "pipeline_schedule": "1f1b"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tensor 2, pipeline 2": (4, {"tensor_model_parallel_size": 2, **PP2}),
}


def batches(cache: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The global batches that a run with the seed of the flags trains on."""
    os.environ["MEGASNN_CACHE"] = cache
    data = open_datasets(DataConfig(), MODEL.input_shape, MODEL.num_classes, shards_of_sample)
    size = SIZES["global_batch_size"]
    loader = BatchLoader(data.train, Share(size, size), LoaderOptions(seed=1234))
    for batch in islice(loader.batches(), SIZES["train_iters"]):
        (whole,) = batch.micro_batches
        yield whole.images.contiguous(), whole.labels


def stand_in(tensor: Tensor, is_needed: bool) -> Tensor:
    return tensor if is_needed else torch.empty(len(tensor), device="meta")


def from_python(cache: str, flags: dict[str, Any], folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps; their losses, and the weights after them."""
    with Engine(MODEL, **SIZES, **flags) as engine:
        losses = [
            engine.train_step(stand_in(x, engine.takes_images), stand_in(y, engine.takes_labels)).loss
            for x, y in batches(cache)
        ]
        weights = engine.state_dict()
        engine.load(folder)  # what the command line has saved
        assert engine.iteration == 3 and engine.consumed_samples == 30
        assert all(torch.equal(value, weights[name]) for name, value in engine.state_dict().items())
    assert not model_parallel_is_initialized()
    return losses, weights


def by_command_line(cache: str, folder: str, flags: dict[str, Any]) -> None:
    given = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    log = ("--train-iters", "3", "--eval-iters", "0", "--log-interval", "1")
    with without_trial():
        train(cache, *log, "--save", folder, *given)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_computes_what_the_command_line_does(ranks, tmp_path_factory, tmp_path, layout: str) -> None:
    size, flags = LAYOUTS[layout]
    cache = str(tmp_path_factory.getbasetemp() / "cache")
    ranks(size, by_command_line, cache, str(tmp_path), flags)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if line["kind"] == "iteration"]
    saved = load_global_tensors(tmp_path)
    for of_rank, weights in ranks(size, from_python, cache, flags, str(tmp_path)):
        assert of_rank == losses and len(losses) == 3
        assert weights.keys() == saved.keys()
        assert all(torch.equal(weights[name], value) for name, value in saved.items())


def answers(flags: dict[str, Any]) -> dict[str, Any]:
    """What an engine in float64 says of samples, few and uneven ones too, after a step."""
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(23, *MODEL.input_shape, generator=generator)
    labels = torch.randint(10, (23,), generator=generator)
    with Engine(MODEL, **SIZES, **flags, precision="fp64", ema_decay=0.5) as engine:
        engine.train_step(images[:9], labels[:9])
        pairs = [(images[:1], labels[:1]), (images[1:], labels[1:])]
        return {
            "logits": engine.predict(images),
            "of one": engine.predict(images[22:]),
            "whole": engine.evaluate(images, labels),
            "in parts": engine.evaluate(pairs),
            "labels": labels,
        }


def test_predictions_are_in_order_and_the_same_on_every_layout(ranks) -> None:
    (one,) = ranks(1, answers, {})
    logits, record = one["logits"], one["whole"]
    assert logits.shape == (23, 10) and logits.std() > 0
    assert record.top1 == (logits.argmax(1) == one["labels"]).double().mean()
    assert record.samples == 23 and record.loss == pytest.approx(one["in parts"].loss, rel=1e-12)
    for size, flags in ((2, {"tensor_model_parallel_size": 2}), (4, PP2)):
        for found in ranks(size, answers, flags):
            assert found["of one"].shape == (1, 10)
            assert torch.equal(found["logits"][22:], found["of one"]) or torch.allclose(
                found["logits"][22:], found["of one"], rtol=1e-12, atol=0
            )
            assert (found["logits"] - logits).norm() <= 1e-9 * logits.norm()
            assert found["whole"].top1 == record.top1 and found["in parts"].top5 == record.top5


def images(samples: int = 10) -> Tensor:
    return torch.rand(samples, *MODEL.input_shape, generator=torch.Generator().manual_seed(0))


def test_a_saved_engine_goes_on_where_it_stood(tmp_path: Path) -> None:
    x, y = images(), torch.arange(10)
    with Engine(MODEL, **SIZES, ema_decay=0.9) as engine:
        engine.train_step(x, y)
        path = engine.save(tmp_path)
        result, averages = engine.train_step(x, y), [entry.tensor.clone() for entry in engine.step.average.tensors]
    assert path == tmp_path / "iter_0000001"
    with Engine(MODEL, **SIZES, ema_decay=0.9) as engine:
        engine.load(tmp_path)
        assert engine.train_step(x, y) == result
        assert all(torch.equal(a, e.tensor) for a, e in zip(averages, engine.step.average.tensors, strict=True))
        weights = engine.state_dict()
        engine.load_state_dict({name: torch.zeros_like(value) for name, value in weights.items()})
        assert not any(value.any() for value in engine.state_dict().values())
        for wrong, problem in (
            ({name: value for name, value in weights.items() if name != "head.weight"}, "head.weight: missing"),
            ({name: value.long() for name, value in weights.items()}, "head.weight: has values of torch.int64"),
            (weights | {"head.weight": "w"}, "head.weight: is a str, not a tensor"),
            ("weights.pt", "a dict of tensors by their names, got str"),
        ):
            with pytest.raises(megasnn.CheckpointError, match=problem):
                engine.load_state_dict(wrong)
        assert not any(value.any() for value in engine.state_dict().values())


def test_flags_that_changed_are_told_and_weights_alone_are_taken(tmp_path: Path) -> None:
    with Engine(MODEL, **SIZES) as engine:
        engine.train_step(images(), torch.arange(10))
        engine.save(tmp_path)
        weights = engine.state_dict()
    with Engine(MODEL, **{**SIZES, "micro_batch_size": 5}) as engine:
        with pytest.warns(UserWarning, match="--micro-batch-size from 4 to 5"):
            engine.load(tmp_path)
    with Engine(MODEL, **SIZES, optimizer="sgd", ema_decay=0.5) as engine:
        with pytest.raises(megasnn.CheckpointError, match="AdamW"):
            engine.load(tmp_path)
        engine.load(tmp_path, weights_only=True)
        assert engine.iteration == 0
        assert all(torch.equal(value, weights[name]) for name, value in engine.state_dict().items())
        assert engine.train_step(images(), torch.arange(10).int()).loss > 0


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"learning_rate": 1.0}, "unknown name 'learning_rate'"),
        ({"micro_batchsize": 1}, "is it 'micro_batch_size'"),
        ({"embed_dim": 64}, r"embed_dim is a dimension of the model: Spikformer\(embed_dim=...\)"),
        ({"train_epochs": 1}, "train_epochs is for whole runs"),
        ({"save": "there"}, "save is for whole runs"),
        ({"augment": "crop"}, "augment is for whole runs"),
        ({"lr_interval": "epoch"}, "lr_interval is for whole runs"),
        ({"check_replicas_interval": 3}, "check_replicas_interval is for whole runs"),
        (
            {"mixup_alpha": 0.2, "mixup_off_epoch": 3, "log_interval": 1},
            r"^2 problems .*\n.* mixup_off_epoch is for whole",
        ),
        ({"lr": "fast"}, "--lr fast"),
        ({"loss": "l1"}, "--loss 'l1'"),
        ({"train_iters": None}, "give train_iters"),
        ({"micro_batch_size": 128}, "--micro-batch-size 128 is larger than --global-batch-size 10"),
        ({"tensor_model_parallel_size": 2}, "world size 1"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Engine(MODEL, **{**SIZES, **flags})
    assert not model_parallel_is_initialized()


def test_batches_that_cannot_work_are_refused() -> None:
    x, y = images(), torch.arange(10)
    with Engine(MODEL, **{**SIZES, "train_iters": 1}) as engine:
        for wrong, labels, problem in (
            (x[:, 0], y, r"images must be \[N, 1, 8, 8\], as the model's input_shape says, got \[10, 8, 8\]"),
            (x[:0], y[:0], "one sample or more"),
            ((x > 0).to(torch.uint8), y, "floating-point"),
            (x, y[:9], "one for each of the 10 images"),
            (x, y + 1, "labels are from 1 to 10; with num_classes 10 they must be from 0 to 9"),
            (x, torch.rand(10, 9), r"soft labels must be \[10, 10\], got \[10, 9\]"),
            (x, None, "labels must be a tensor"),
            (x.to("meta"), y, "this rank has the first stage"),
        ):
            with pytest.raises(ValueError, match=problem):
                engine.train_step(wrong, labels)
        assert engine.iteration == 0
        with pytest.raises(ValueError, match="class indices"):
            engine.evaluate(x, torch.rand(10, 10))
        for wrong in (x, [(x,)], [x], [3]):
            with pytest.raises(ValueError, match="must be a tensor"):
                engine.evaluate(wrong)
        for wrong, labels in ((x.numpy(), y), (None, None), (3, None)):
            with pytest.raises(ValueError, match="images must be a tensor"):
                engine.evaluate(wrong, labels)
        with pytest.raises(ValueError, match="no samples"):
            engine.evaluate([])
        engine.train_step(x, torch.rand(10, 10))
        with pytest.raises(ValueError, match="all 1 steps of the training are done"):
            engine.train_step(x, y)
    with pytest.raises(ValueError, match="closed"):
        engine.predict(x)
    with pytest.raises(ValueError, match="give an instance of a subclass of megasnn.Model"):
        Engine(Spikformer)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class PooledUnit(Model):
    """The first norm has its pooling and neurons behind it, which hide a nan."""

    image_size: int = 8
    in_channels: int = 1
    time_steps: int = 2

    def layers(self) -> Iterator[Layer]:
        yield layer("first", ConvNormNeuron(1, 4, kernel_size=3, max_pool=True))
        yield layer("head", MeanLinear(4, self.num_classes))


@pytest.mark.parametrize("backend", ["torch", "fused"])
def test_a_nan_in_an_image_is_told(backend: str) -> None:
    x, y = images(), torch.arange(10)
    x[3, 0, 2, 5] = torch.nan
    with Engine(PooledUnit(), **{**SIZES, "train_iters": 1}, neuron_backend=backend) as engine:
        before = engine.state_dict()
        result = engine.train_step(x, y)
        assert result.not_finite and "not finite in forward, first in first.conv" in result.not_finite
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        for call in (lambda: engine.evaluate(x, y), lambda: engine.predict(x)):
            with pytest.raises(ValueError, match=r"images hold 1 value\(s\) that are nan or infinite"):
                call()
        assert engine.evaluate(images(), y).samples == 10


def test_images_and_labels_go_to_a_gpu_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[int, ...]] = []

    def noted(values: Tensor, device: torch.device) -> Tensor:
        moved.append(tuple(values.shape))
        return values

    monkeypatch.setattr("megasnn.engine.batch.without_waiting", noted)
    with Engine(MODEL, **SIZES) as engine:
        engine.train_step(images(), torch.arange(10))
    assert moved == [shape for size in (4, 4, 2) for shape in ((size, 1, 8, 8), (size,))]


@dataclass(frozen=True, kw_only=True)
class Pooled(megasnn.Model):
    """Pooling is a stage of its own below."""

    image_size: int = 8
    in_channels: int = 1

    def layers(self) -> Any:
        yield megasnn.layer("stem", megasnn.ConvNormNeuron(1, 4, kernel_size=3))
        yield megasnn.layer("pool", torch.nn.MaxPool2d(2))
        yield megasnn.layer("head", megasnn.MeanLinear(4, self.num_classes))


def through_pooling(folder: str, flags: dict[str, Any]) -> tuple[list[float], float, dict[str, Tensor]]:
    """Losses of three steps, the third by what was saved after the second; an evaluation, and the weights."""
    x, y = images(), torch.arange(10)
    with Engine(Pooled(), **SIZES, clip_grad=0.1, ema_decay=0.5, **flags) as engine:
        losses = [engine.train_step(x, y).loss for _ in range(2)]
        engine.save(folder)
        losses.append(engine.train_step(x, y).loss)
        engine.load(folder)
        losses.append(engine.train_step(x, y).loss)
        return losses, engine.evaluate(x, y).loss, engine.state_dict()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb"])
def test_a_stage_without_parameters(ranks, tmp_path: Path, optimizer: str) -> None:
    flags: dict[str, Any] = {"optimizer": optimizer, "precision": "fp64"}
    losses, evaluated, weights = through_pooling(str(tmp_path / "one"), flags)
    assert losses[2] == losses[3] != losses[1]
    stages = {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "1|1|1"}
    for found in ranks(3, through_pooling, str(tmp_path / "three"), {**flags, **stages}):
        assert found[:2] == (losses, evaluated)
        assert all(torch.equal(found[2][name], value) for name, value in weights.items())


def refused_together() -> list[str]:
    told = []
    with Engine(MODEL, **SIZES) as engine:
        rank = engine.state.rank
        for size, label in ((10 - rank, 0), (3, 0), (10, 11 * rank)):
            try:
                engine.train_step(images(size), torch.full((size,), label))
            except ValueError as error:
                told.append(str(error))
        with pytest.raises(ValueError, match="another Engine is open"):
            Engine(MODEL, **SIZES)
    return told


def test_what_is_wrong_on_one_rank_is_raised_on_all(ranks) -> None:
    first, second = ranks(2, refused_together)
    assert first == second and len(first) == 3
    assert "10 on rank 0, 9 on rank 1" in first[0] and "3 samples are 1 micro-batch(es)" in first[1]
    assert "labels are from 11 to 11" in first[2]


def around_refusals(evaluates: bool) -> list[Any]:
    """Two steps of a network with a layer on several stages; between them evaluations that are refused."""
    model = Tied()
    x = torch.rand(8, *model.input_shape, generator=torch.Generator().manual_seed(1))
    y = torch.arange(8) % model.num_classes
    told: list[Any] = []
    flags = {"pipeline_model_parallel_size": 2, "ema_decay": 0.9, "precision": "fp64"}
    sizes = {"micro_batch_size": 2, "global_batch_size": 8, "lr": 1e-1, "train_iters": 9}
    with Engine(model, **sizes, **flags) as engine:
        rank = engine.state.rank
        told.append(engine.train_step(x, y).loss)
        if evaluates:
            for pairs in ([(x, y + 100)], [(x, y)] * (2 + rank), [(x.numpy() if rank else x, y)]):
                with pytest.raises(ValueError) as refused:
                    engine.evaluate(pairs)
                told.append(str(refused.value))
        told.append(engine.train_step(x, y).loss)
    with pytest.raises(ValueError, match="those of rank 1 differ from rank 0's: training.seed"):
        Engine(model, **sizes, **flags, seed=rank)
    assert not model_parallel_is_initialized()
    return told


def test_a_refused_evaluation_leaves_everything_as_it_was(ranks) -> None:
    first, second = ranks(2, around_refusals, True)
    quiet, _ = ranks(2, around_refusals, False)
    assert first == second and [first[0], first[-1]] == quiet
    assert "labels are from" in first[1] and "must be a tensor" in first[3]
    assert first[2] == "every rank is given as many batches, but rank 0 has no more of them"


def test_a_run_cannot_go_on_from_an_engine(tmp_path_factory, tmp_path: Path) -> None:
    with Engine(MODEL, **SIZES) as engine:
        engine.train_step(images(), torch.arange(10))
        engine.save(tmp_path)
    cache = str(tmp_path_factory.getbasetemp() / "cache")
    with without_trial(), pytest.raises(megasnn.CheckpointError, match="no place in the data, as a megasnn.Engine"):
        train(cache, "--train-iters", "3", "--eval-iters", "0", "--load", str(tmp_path))
