"""Layers that compute something else in evaluation than in training: every layout predicts what one rank does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn import Engine
from megasnn.common.grid import Grid
from megasnn.layers import BuildContext, ConvNormNeuron
from megasnn.layers.layer import Layer, layer
from megasnn.models.build import describe_model
from megasnn.models.model import Model
from megasnn.parallel_state import ParallelState
from tests.models.networks import CLASSES, Integrates
from tests.parity.ranks import TOLERANCE, is_whole

WIDTH, SAMPLES = 8, 6
Function = Callable[[Tensor], Tensor]


def shuffle(x: Tensor) -> Tensor:
    return x.unflatten(2, (2, -1)).transpose(2, 3).flatten(2, 3)


def attention(x: Tensor) -> Tensor:
    rows = x.flatten(3)
    return ((rows @ rows.transpose(-1, -2)).softmax(-1) @ rows).view(x.shape)


def product(x: Tensor) -> Tensor:
    return (x.movedim(2, -1) @ x.new_ones(x.shape[2], x.shape[2])).movedim(-1, 2)


def along_channels(x: Tensor) -> Tensor:
    """A convolution along the channels of each pixel."""
    lines = x.movedim(2, -1)
    kernel = x.new_full((1, 1, 3), 0.5)
    return F.conv1d(lines.flatten(0, -2).unsqueeze(1), kernel, padding=1).view(lines.shape).movedim(-1, 2)


def changed(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :, 0] = y[:, :, -1] + y[:, :, 1]
    return y


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x - x.mean(2, keepdim=True)


# Of channels [T, N, C, H, W]: each rank would get other numbers with its own alone.
MIXING: dict[str, Function] = {
    "softmax": lambda x: x.softmax(2),
    "log softmax": lambda x: F.log_softmax(x, 2),
    "normalised": lambda x: F.normalize(x, dim=2),
    "layer norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "group norm": lambda x: F.group_norm(x.flatten(0, 1), 1).view(x.shape),
    "response norm": lambda x: F.local_response_norm(x.flatten(0, 1), 3).view(x.shape),
    "divided by its norm": lambda x: x / (1 + x.norm(dim=2, keepdim=True)),
    "flip": lambda x: x.flip(2),
    "roll": lambda x: x.roll(1, 2),
    "shuffle": shuffle,
    "sort": lambda x: x.sort(2).values,
    "largest three": lambda x: torch.where(x >= x.topk(3, 2).values[:, :, -1:], x, 0.0 * x),
    "largest": lambda x: x - x.amax(2, keepdim=True),
    "which is largest": lambda x: F.one_hot(x.argmax(2), x.shape[2]).movedim(-1, 2).to(x.dtype),
    "sums so far": lambda x: x.cumsum(2),
    "largest so far": lambda x: x.cummax(2).values,
    "mean": lambda x: x - x.mean(2, keepdim=True),
    "deviation": lambda x: x / (1 + x.std(2, keepdim=True)),
    "median": lambda x: x - x.median(2, keepdim=True).values,
    "product": product,
    "einsum": lambda x: torch.einsum("tnchw,tndhw->tnchw", x, x),
    "attention": attention,
    "distances": lambda x: x * torch.cdist(x.flatten(3), x.flatten(3)).mean(-1)[..., None, None],
    "convolution": along_channels,
    "pool": lambda x: F.avg_pool3d(x, (3, 1, 1), 1, (1, 0, 0)),
    "spectrum": lambda x: torch.fft.rfft(x, dim=2).abs().repeat_interleave(2, 2)[:, :, : x.shape[2]],
    "first channel": lambda x: x * x[:, :, :1],
    "halves": lambda x: torch.cat(x.chunk(2, 2)[::-1], 2),
    "stacked": lambda x: torch.stack(x.unbind(2)[::-1], 2),
    "chosen by number": lambda x: x.index_select(2, torch.arange(x.shape[2], device=x.device).flip(0)),
    "gathered": lambda x: x.gather(2, x.argsort(2)),
    "changed": changed,
    "number of channels": lambda x: x * x.shape[2] ** -0.5,
    "numbered": lambda x: x * torch.arange(x.shape[2], device=x.device).view(-1, 1, 1),
    "all of a sample": lambda x: x / (1 + x.sum((0, 2, 3, 4), keepdim=True)),
    "mapped": lambda x: torch.vmap(lambda each: each - each.mean(2, keepdim=True))(x),
    "operator": lambda x: torch.ops.aten.roll(x, [1], [2]),
    "scripted": scripted,
    "of another library": lambda x: torch.from_numpy(x.numpy()[:, :, ::-1].copy()),
    "chosen by values": lambda x: x.flip(2) if x.isfinite().all() else x,
}
# Right for a rank's channels too, but nothing here knows that.
BY_CHANNEL: dict[str, Function] = {
    "mean of pixels": lambda x: x - x.mean((3, 4), keepdim=True),
    "upside down": lambda x: x.flip(3),
    "sums over time": lambda x: x.cumsum(0),
    "pool of pixels": lambda x: F.avg_pool3d(x, (1, 3, 3), 1, (0, 1, 1)),
}
BY_ELEMENT: dict[str, Function] = {
    "half": lambda x: 0.5 * x,
    "three times": lambda x: 3 * x,
    "functions": lambda x: (F.silu(x) * x.sigmoid()).clamp(0, 0.7),
    "chosen": lambda x: torch.where(x > 0, x, 0.5 * x),
    "in place": lambda x: x.clone().mul_(2).add_(x),
}
FUNCTIONS = MIXING | BY_CHANNEL | BY_ELEMENT
ROLL = MIXING["roll"]


class Evaluates(nn.Module):
    """Applies a function in evaluation only."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else self.function(x)


class WithoutGradients(Evaluates):
    def forward(self, x: Tensor) -> Tensor:
        return x if torch.is_grad_enabled() else self.function(x)


class Flagged(Evaluates):
    """A flag of its own says in which mode it is."""

    def train(self, mode: bool = True) -> Flagged:
        self.evaluates = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) if self.evaluates else x


class MadeInEvaluation(Evaluates):
    """Made in evaluation mode, in which training does not leave it, and mixes in training only."""

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) if self.training else x


class Inhibits(Integrates):
    """In evaluation, each neuron is held back by the others at its place."""

    def charge(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        return super().charge(x if self.training else x - x.mean(1, keepdim=True), state)


class Within(nn.Module):
    """Parts in parts, behind a unit."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.unit = ConvNormNeuron(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Sequential(*parts), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.unit(x))


class Inputs(nn.Module):
    """A unit that is given spikes in training, and parts of them in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = ConvNormNeuron(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(x if self.training else 0.5 * x)


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda of, inputs, output: None if of.training else ROLL(output))
    return module


def hooked_before(module: nn.Module) -> nn.Module:
    module.register_forward_pre_hook(lambda of, inputs: None if of.training else (ROLL(inputs[0]),))
    return module


PLACES: dict[str, Callable[[], nn.Module]] = {
    "without gradients": lambda: Within(WithoutGradients(ROLL)),
    "by a flag": lambda: Within(Flagged(ROLL)),
    "nested": lambda: Within(nn.Sequential(nn.ReLU(), Evaluates(ROLL)), nn.ReLU()),
    "alone": lambda: Evaluates(ROLL),
    "by a hook": lambda: hooked(Within()),
    "by a hook before": lambda: hooked_before(Within()),
    "by a hook of a part": lambda: Within(hooked(nn.ReLU())),
    "by a hook of a unit": lambda: hooked(ConvNormNeuron(WIDTH, WIDTH)),
    "by a hook of a norm": lambda: hooked(ConvNormNeuron(WIDTH, WIDTH).norm),
    "in a neuron": lambda: Inhibits(WIDTH),
    "by a module": lambda: Within(Evaluates(nn.Softmax(2))),
    "in training": lambda: Within(MadeInEvaluation(ROLL)),
    "scripted in training": lambda: Within(MadeInEvaluation(scripted)),
}


WAYS = [*FUNCTIONS, *PLACES]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tensor_model_parallel_size": 2}),
    "stages of samples": (4, {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}),
}


@dataclass(frozen=True, kw_only=True)
class Of(Model):
    """Ways to compute something else in evaluation, side by side, each with a unit behind it and logits of its own."""

    image_size: int = 4
    time_steps: int = 2
    num_classes: int = CLASSES * len(WAYS)

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, WIDTH))
        for way in WAYS:
            function = FUNCTIONS.get(way)
            module = PLACES[way]() if function is None else Within(Evaluates(function))
            yield layer(way, module, takes="stem")
            yield layer(f"{way}, unit", Inputs(), takes=way)
        yield layer("head", all_logits, takes=[name for way in WAYS for name in (way, f"{way}, unit")])


def logits(way: Tensor, unit: Tensor) -> Tensor:
    pixels = (way.sin() + unit).flatten(2)
    weights = torch.linspace(0.1, 1, pixels.shape[2] // CLASSES).to(pixels)
    return torch.stack([(each * weights).sum(2) for each in pixels.chunk(CLASSES, 2)], 2)


def all_logits(*outputs: Tensor) -> Tensor:
    return torch.cat([logits(way, unit) for way, unit in zip(outputs[::2], outputs[1::2], strict=True)], 2)


def _firing(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights with running statistics by which neurons fire in evaluation."""
    means = [name for name in values if name.endswith("running_mean")]
    return {**values, **{name: torch.linspace(-1.5, 0.5, WIDTH).to(values[name]) for name in means}}


def _found(flags: dict[str, Any]) -> tuple[float, Tensor, float]:
    """Loss of a step, and behind it predictions and loss of an evaluation."""
    generator = torch.Generator().manual_seed(3)
    images = 2 * torch.randn(SAMPLES, 3, 4, 4, generator=generator).double()
    labels = torch.arange(SAMPLES)
    sizes = {"micro_batch_size": 3, "global_batch_size": SAMPLES, "train_iters": 1}
    with Engine(Of(), precision="fp64", lr=0.1, **sizes, **flags) as engine:
        engine.load_state_dict(_firing(engine.state_dict()))
        loss = engine.train_step(images, labels).loss
        return loss, engine.predict(images), engine.evaluate(images, labels).loss


def test_what_mixes_channels_in_one_mode_is_whole_and_what_does_not_is_cut() -> None:
    built = describe_model(Of()).build(BuildContext(ParallelState.without_process_groups(Grid(tp=2))))
    whole = {each.name: is_whole(each.module) for each in built}
    for way in WAYS:
        assert whole[way] == (way not in BY_ELEMENT), way
        assert not whole[f"{way}, unit"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_predict_what_one_rank_does(ranks, layout: str) -> None:
    size, flags = LAYOUTS[layout]
    ((loss, predicted, evaluated),) = ranks(1, _found, {})
    for found_loss, found, found_evaluated in ranks(size, _found, flags):
        assert found_loss == pytest.approx(loss, rel=TOLERANCE)
        assert found_evaluated == pytest.approx(evaluated, rel=TOLERANCE)
        for way, mine, expected in zip(WAYS, found.split(CLASSES, 1), predicted.split(CLASSES, 1), strict=True):
            assert (mine - expected).norm() <= TOLERANCE * expected.norm(), way


class Counts(nn.Module):
    """Keeps a number in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.seen += 1
        return x


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "random": (lambda: Evaluates(F.dropout), "draws random numbers that depend on the layout"),
    "input": (lambda: Evaluates(lambda x: x.mul_(2)), "changes its input in place"),
    "buffer": (Counts, "changes its buffer 'seen'"),
    "a bundle": (lambda: Evaluates(lambda x: (x, x)), r"returns .* in training, and .* in evaluation"),
    "samples": (lambda: Evaluates(lambda x: x.sum(1, keepdim=True)), "is not .* of 2 samples"),
}


@dataclass(frozen=True, kw_only=True)
class Refused(Model):
    image_size: int = 4
    num_classes: int = CLASSES
    way: str = ""

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, WIDTH))
        yield layer("way", REFUSED[self.way][0]())
        yield layer("head", logits, takes=("way", "stem"))


@pytest.mark.parametrize("way", REFUSED)
def test_what_is_refused_in_training_is_refused_in_evaluation_too(way: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[way][1]):
        describe_model(Refused(way=way))
