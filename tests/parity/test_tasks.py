"""Models with tasks of their own: several inputs, whole numbers, any target, loss and metrics, on any layout."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, neuron, surrogate
from torch import Tensor, nn

from megasnn import ArraySpec, ConvNormNeuron, Engine, MeanLinear, Model, ParallelConv, layer
from megasnn.config import ConfigError
from megasnn.layers.layer import Layer
from tests.models.networks import Join, Up
from tests.parity.ranks import TOLERANCE, error

SAMPLES, MICRO = 7, 4  # the last micro-batch of a step has three samples
CLASSES = 3


@dataclass(frozen=True, kw_only=True)
class Task(Model):
    image_size: int = 8
    time_steps: int = 2
    num_classes: int = CLASSES
    width: int = 4


@dataclass(frozen=True, kw_only=True)
class Segments(Task):
    """A class for each pixel, from a U-Net whose skips cross stages; its last layer is cut by channel."""

    @property
    def target(self) -> ArraySpec:
        return ArraySpec((self.image_size, self.image_size), "int", below=self.num_classes)

    def layers(self) -> Iterable[Layer]:
        width = self.width
        yield layer("stem", ConvNormNeuron(3, width, 3))
        yield layer("down.0", ConvNormNeuron(width, 2 * width, 3, stride=2))
        yield layer("down.1", ConvNormNeuron(2 * width, 2 * width, 3, stride=2))
        yield layer("up.1", Up(2 * width, 2 * width), takes=("down.1", "down.0"))
        yield layer("up.0", Up(2 * width, width), takes=("up.1", "stem"))
        yield layer("join", Join(), takes=("up.0", "stem"))
        yield layer("head", ParallelConv(2 * width, 4, 1))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.mean(0), target, reduction="none").mean((1, 2))

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        hits = output.mean(0).argmax(1) == target
        return {"pixels": hits.double().mean((1, 2)), "perfect": hits.all(2).all(1)}

    def predict(self, output: Tensor) -> Tensor:
        return output.mean(0).argmax(1)


@dataclass(frozen=True, kw_only=True)
class EachStep(Task):
    """A class for each time step of frames, by plain modules."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.time_steps, 2, self.image_size, self.image_size

    @property
    def target(self) -> ArraySpec:
        return ArraySpec((self.time_steps,), "int", below=self.num_classes)

    def layers(self) -> Iterable[Layer]:
        yield layer("conv", nn.Conv2d(2, self.width, 3, padding=1))
        yield layer("norm", nn.BatchNorm2d(self.width))
        yield layer("fire", neuron.LIFNode(step_mode="m", surrogate_function=surrogate.Sigmoid()))
        yield layer("unit", ConvNormNeuron(self.width, 2 * self.width, 3, stride=2))
        yield layer("head", MeanLinear(2 * self.width, self.num_classes))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.permute(1, 2, 0), target, reduction="none").mean(1)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"steps": (output.argmax(2).T == target).double().mean(1)}

    def predict(self, output: Tensor) -> Tensor:
        return output.transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class Regresses(Task):
    """Two numbers for each image; a dict of tensors from the last layer, and no metrics."""

    @property
    def target(self) -> ArraySpec:
        return ArraySpec((2,))

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, self.width, 3))
        yield layer("unit", ConvNormNeuron(self.width, 2 * self.width, 3, stride=2))
        yield layer("head", MeanLinear(2 * self.width, 2))
        yield layer("answer", lambda x: {"mean": x.mean(0, keepdim=True), "steps": x})

    def loss(self, output: Mapping[str, Tensor], target: Tensor) -> Tensor:
        return (output["mean"][0] - target).square().mean(1) + 0.1 * output["steps"].square().mean((0, 2))

    def predict(self, output: Mapping[str, Tensor]) -> Tensor:
        return output["mean"][0]


class Embed(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).movedim(-1, 2)


class Past(nn.Module):
    """A residual unit in which a token sees itself and two before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.unit = ConvNormNeuron(width, width, 3, dims=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.unit(F.pad(x, (1, 0))[..., :-1])


class NextWord(nn.Module):
    def __init__(self, embed: Embed) -> None:
        super().__init__()
        self.table = nn.Embedding(*embed.table.weight.shape)
        self.table.weight = embed.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.movedim(2, -1), self.table.weight)  # [T, N, L, words]


@dataclass(frozen=True, kw_only=True)
class Language(Task):
    """The next letter of a text; the matrix of the last layer is that of the first."""

    target = "tokens"

    @property
    def inputs(self) -> Mapping[str, ArraySpec]:
        return {"tokens": ArraySpec((12,), "int", below=128)}

    def layers(self) -> Iterable[Layer]:
        embed = Embed(128, 8)
        yield layer("embed", embed)
        yield layer("past.0", Past(8))
        yield layer("past.1", Past(8))
        yield layer("next", NextWord(embed))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        logits = output.mean(0)[:, :-1].transpose(1, 2)
        return F.cross_entropy(logits, target[:, 1:], reduction="none").mean(1)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"letters": (output.mean(0)[:, :-1].argmax(2) == target[:, 1:]).double().mean(1)}


class Halves(nn.Module):
    def forward(self, image: Tensor, events: Tensor) -> Tensor:
        return 0.5 * image + events


@dataclass(frozen=True, kw_only=True)
class TwoSensors(Task):
    """A class from an image and the events beside it, by the losses of --loss."""

    @property
    def inputs(self) -> Mapping[str, ArraySpec]:
        size, steps = self.image_size, self.time_steps
        return {"image": ArraySpec((3, size, size)), "events": ArraySpec((steps, 2, size, size), over_time=True)}

    def layers(self) -> Iterable[Layer]:
        yield layer("of.image", ConvNormNeuron(3, self.width, 3), takes="image")
        yield layer("of.image.2", ConvNormNeuron(self.width, self.width, 3))
        yield layer("of.events", ConvNormNeuron(2, self.width, 3), takes="events")  # which a stage hands on
        yield layer("join", Halves(), takes=("of.image.2", "of.events"))
        yield layer("unit", ConvNormNeuron(self.width, 2 * self.width, 3, stride=2))
        yield layer("head", MeanLinear(2 * self.width, self.num_classes))


MODELS = {each.__name__: each() for each in (Segments, EachStep, Regresses, Language, TwoSensors)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv", "recompute": "always"},
    "cp2": {"context_parallel_size": 2, "context_parallel_cut": "samples"},
}


def batch(model: Model, samples: int = SAMPLES) -> tuple[Any, Tensor | None]:
    draws = torch.Generator().manual_seed(1)
    inputs = {name: 2 * each.examples(samples, draws).double() for name, each in model.inputs.items()}
    if isinstance(model, Language):
        text = inspect.getsource(textwrap)  # ships with Python
        return torch.tensor([[ord(each) % 128 for each in text[60 * n : 60 * n + 12]] for n in range(samples)]), None
    spec = model.target
    assert isinstance(spec, ArraySpec)
    targets = spec.examples(samples, draws)
    return inputs if len(inputs) > 1 else next(iter(inputs.values())), targets


@dataclass
class Found:
    losses: list[float]
    sums: list[Mapping[str, float]]
    evaluated: Mapping[str, float]
    answers: Tensor
    weights: dict[str, Tensor]


def found(name: str, flags: Mapping[str, Any]) -> Found:
    """Two steps of AdamW, and what model says behind them; a rank is given the values that it needs alone."""
    model = MODELS[name]
    with Engine(
        model, micro_batch_size=MICRO, global_batch_size=SAMPLES, train_iters=2, lr=1e-2, precision="fp64", **flags
    ) as engine:
        inputs, targets = batch(model)
        if not engine.takes_targets and targets is not None:
            targets = torch.empty(SAMPLES, device="meta")
        if not engine.takes_inputs and not isinstance(model, Language):
            like = torch.empty(SAMPLES, device="meta")
            inputs = dict.fromkeys(inputs, like) if isinstance(inputs, Mapping) else like
        steps = [engine.train_step(inputs, targets) for _ in range(2)]
        record = engine.evaluate(inputs, targets)
        answers = engine.predict(inputs)
        assert record.samples == SAMPLES
        figures = {"loss": record.loss, **record.metrics}
        return Found([s.loss for s in steps], [s.sums for s in steps], figures, answers, engine.state_dict())


@cache
def one(name: str) -> Found:
    return found(name, {})


def found_all(flags: Mapping[str, Any]) -> dict[str, Found]:
    return {name: found(name, flags) for name in MODELS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_what_one_rank_does(ranks, layout: str) -> None:
    flags = dict(LAYOUTS[layout])
    for of_rank in ranks(2, found_all, flags):
        for name, other in of_rank.items():
            assert other.losses == pytest.approx(one(name).losses, rel=TOLERANCE)
            assert other.evaluated == pytest.approx(one(name).evaluated, rel=TOLERANCE)
            assert [*map(dict, other.sums)] == [pytest.approx(each, rel=TOLERANCE) for each in one(name).sums]
            assert other.answers.dtype == one(name).answers.dtype
            torch.testing.assert_close(other.answers, one(name).answers, rtol=TOLERANCE, atol=1e-12)
            for tensor, value in one(name).weights.items():
                assert error(other.weights[tensor], value) < TOLERANCE or value.abs().max() < 1e-12, (name, tensor)


# --- one rank is plain PyTorch and SpikingJelly


def segmented(weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Logits of `Segments` in training, `[T, N, classes, H, W]`."""

    def unit(name: str, x: Tensor, stride: int = 1) -> Tensor:
        kernel = weights[f"{name}.conv.weight"]
        y = F.conv2d(x.flatten(0, 1), kernel, stride=stride, padding=kernel.shape[-1] // 2)
        y = F.batch_norm(y, None, None, weights[f"{name}.norm.weight"], weights[f"{name}.norm.bias"], training=True)
        fire = neuron.LIFNode(tau=2.0, surrogate_function=surrogate.Sigmoid(), detach_reset=True, step_mode="m")
        functional.reset_net(fire)
        return fire(y.unflatten(0, x.shape[:2]))

    def twice(x: Tensor) -> Tensor:
        return F.interpolate(x.flatten(0, 1), scale_factor=2, mode="nearest").unflatten(0, x.shape[:2])

    stem = unit("stem", images.repeat(2, 1, 1, 1, 1))
    down = unit("down.0", stem, stride=2)
    up = twice(unit("up.1.unit", unit("down.1", down, stride=2))) + down
    joined = torch.cat([twice(unit("up.0.unit", up)) + stem, stem], 2)
    return F.conv2d(joined.flatten(0, 1), weights["head.weight"]).unflatten(0, stem.shape[:2])


def test_a_segmentation_on_one_rank_is_that_of_pytorch_and_spikingjelly() -> None:
    model = MODELS["Segments"]
    images, targets = batch(model)
    flags = {"weight_decay": 0.0, "clip_grad": 0.0, "lr_decay_style": "constant", "precision": "fp64"}
    with Engine(model, micro_batch_size=MICRO, global_batch_size=SAMPLES, lr=1e-2, **flags) as engine:
        before = engine.state_dict()
        losses = [engine.train_step(images, targets).loss for _ in range(2)]
        after = engine.state_dict()
    weights = {name: value.requires_grad_() for name, value in before.items() if name.endswith(("weight", "bias"))}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-2, weight_decay=0.0)
    for found_loss in losses:
        optimizer.zero_grad()
        expected = 0.0
        for part in (slice(0, MICRO), slice(MICRO, SAMPLES)):
            logits = segmented(weights, images[part]).mean(0)
            loss = F.cross_entropy(logits, targets[part], reduction="none").mean((1, 2)).sum() / SAMPLES
            loss.backward()
            expected += loss.item()
        optimizer.step()
        assert found_loss == pytest.approx(expected, rel=TOLERANCE)
    for name, value in weights.items():
        assert error(after[name], value.detach()) < TOLERANCE, name


# --- figures, and what is refused


def test_metrics_are_sums_over_samples_whatever_the_micro_batches() -> None:
    images, targets = batch(MODELS["Segments"], 11)
    flags = {"global_batch_size": 11, "lr": 1e-2, "train_iters": 1, "precision": "fp64"}
    for size in (1, 4, 11):
        with Engine(MODELS["Segments"], micro_batch_size=size, **flags) as engine:
            hits = (engine.predict(images) == targets).double()
            record = engine.evaluate([(images[:3], targets[:3]), (images[3:], targets[3:])])
            result = engine.train_step(images, targets)
        with pytest.raises(AttributeError, match="pixels"):
            _ = record.top1
        assert record.samples == 11 and record.metrics["pixels"] == pytest.approx(hits.mean().item(), rel=1e-12)
        assert result.metrics == {name: value / 11 for name, value in result.sums.items()} and result.samples == 11
        assert 0 < result.sums["pixels"] < 11


@pytest.mark.parametrize(
    ("name", "flags", "named"),
    [
        ("Segments", {"context_parallel_size": 2, "context_parallel_cut": "rows"}, "--context-parallel-cut samples"),
        ("TwoSensors", {"bptt_steps": 1}, "--bptt-steps 1"),
        ("Language", {"mixup_alpha": 0.2}, "--mixup-alpha"),
        ("EachStep", {"cutmix_alpha": 0.2}, "--cutmix-alpha"),
        ("Regresses", {"label_smoothing": 0.1}, "--label-smoothing"),
        ("Regresses", {"loss": "tet"}, "--loss"),
    ],
)
def test_flags_for_images_and_classes_are_refused(monkeypatch, name: str, flags: dict[str, Any], named: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(flags.get("context_parallel_size", 1)))
    with pytest.raises(ConfigError, match=named):
        Engine(MODELS[name], micro_batch_size=MICRO, global_batch_size=SAMPLES, lr=1e-2, train_iters=1, **flags)


def test_batches_that_do_not_fit_are_refused() -> None:
    images, targets = batch(MODELS["TwoSensors"])
    with Engine(MODELS["TwoSensors"], micro_batch_size=MICRO, lr=1e-2, train_iters=1) as engine:
        wrong = [
            (images["image"], "dict"),
            ({"image": images["image"]}, "image, events"),
            ({**images, "events": images["events"][:3]}, r"events .*\[7, 2, 2, 8, 8\]"),
            ({**images, "events": images["events"] * torch.nan}, "events"),
        ]
        for given, named in wrong:
            with pytest.raises(ValueError, match=named):
                engine.evaluate(given, targets)
    text, _ = batch(MODELS["Language"])
    with Engine(MODELS["Language"], micro_batch_size=MICRO, lr=1e-2, train_iters=1) as engine:
        for given, targets, named in (
            (text + 64, None, "128"),
            (text.float(), None, "float32"),
            (text, text, "tokens"),
        ):
            with pytest.raises(ValueError, match=named):
                engine.train_step(given, targets)


@dataclass(frozen=True, kw_only=True)
class Wrong(Regresses):
    wrong: str = ""

    @property
    def inputs(self) -> Mapping[str, ArraySpec]:
        more = {"idle": ArraySpec((1,))} if self.wrong == "idle" else {}
        return {"stem" if self.wrong == "stem" else "images": ArraySpec((3, 8, 8)), **more}

    @property
    def target(self) -> ArraySpec | str:
        return "labels" if self.wrong == "labels" else ArraySpec((2,))

    def loss(self, output: Mapping[str, Tensor], target: Tensor) -> Tensor:
        found = super().loss(output, target)
        return found.mean() if self.wrong == "loss" else found

    def metrics(self, output: Mapping[str, Tensor], target: Tensor) -> dict[str, Tensor]:
        if self.wrong == "metrics":
            return {"far": target[target > 0]}
        return {"far": super().loss(output, target)[: 1 if self.wrong == "far" else None]}

    def predict(self, output: Mapping[str, Tensor]) -> Any:
        return output if self.wrong == "predict" else output["mean"][0]


@pytest.mark.parametrize("wrong", ["idle", "stem", "labels", "loss", "far", "metrics", "predict"])
def test_a_task_that_cannot_be_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"wrong: .*{wrong}"):
        Engine(Wrong(wrong=wrong), train_iters=1)
