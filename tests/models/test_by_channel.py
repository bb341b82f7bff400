"""Layers that a rank computes with its own channels, and those that it must not: each computes what one rank does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megasnn
from megasnn.common.grid import Grid
from megasnn.kernels import NeuronSpec
from megasnn.layers import (
    BuildContext,
    ConvNormNeuron,
    MeanLinear,
    MeanOverSpace,
    ParallelBatchNorm,
    ParallelDropout,
    ParallelLinear,
    ParallelNeuron,
    Residual,
)
from megasnn.layers.layer import Layer, layer
from megasnn.models.build import describe_model
from megasnn.models.model import Model
from megasnn.models.registry import MODELS
from megasnn.parallel_state import ParallelState
from tests.models import given_to_shard as networks
from tests.models.networks import CLASSES, Integrates, between
from tests.parity.ranks import Layout, RankStep, assert_equal, is_whole, one_step

WIDTH, TWO = 8, BuildContext(ParallelState.without_process_groups(Grid(tp=2)))
Function = Callable[[Tensor], Tensor]


class MixedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(2, keepdim=True)


# Ways to mix channels [T, N, C, H, W], in which each rank would get other numbers with its own alone.
def shuffle(x: Tensor, groups: int = 2) -> Tensor:
    return x.view(*x.shape[:2], groups, -1, *x.shape[3:]).transpose(2, 3).reshape(x.shape)


def attention(x: Tensor) -> Tensor:
    rows = x.flatten(3).flatten(0, 1)  # [T * N, C, H * W]
    return ((rows @ rows.transpose(1, 2)).softmax(-1) @ rows).view(x.shape)


MIXING: dict[str, Function] = {
    "shuffle": shuffle,
    "attention": attention,
    "chunk": lambda x: torch.cat(x.chunk(2, 2)[::-1], 3),
    "softmax": lambda x: x.softmax(2),
    "layer norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "first channel": lambda x: x * x[..., :1, :, :],
    "mean": lambda x: x - x.mean(2, keepdim=True),
    "largest with index": lambda x: x - x.max(2, keepdim=True).values,
    "rolled flat": lambda x: x.roll(1),
    "neighbours": lambda x: F.avg_pool1d(x.flatten(0, 1).flatten(2).transpose(1, 2), 3, 1, 1),
    "joined": lambda x: torch.cat((x, x), 2).softmax(3).sum(2),
    "outer product": lambda x: x.mean((3, 4)).unsqueeze(-1) * x.mean((3, 4)).unsqueeze(-2),
    "number of channels": lambda x: x * x.shape[2] ** -0.5,
    "numbered": lambda x: x * torch.arange(x.shape[2], device=x.device).view(-1, 1, 1),
    "mean in place": lambda x: x.clone().sub_(x.mean(2, keepdim=True)),
    "outputs hidden from a dry run": lambda x: x if x.is_meta else x - x.mean(2, keepdim=True),
    "gradients": MixedBackward.apply,
}
BY_ELEMENT: dict[str, Function] = {
    "sums": lambda x: 2 + x + torch.relu(x) - 0.5 * x,
    "in place": lambda x: x.clone().mul_(2).add_(x),
    "chosen": lambda x: torch.where(x > 0, x, 0.5 * x),
    "functions": lambda x: (F.silu(x) * x.sigmoid()).clamp(0, 0.7).detach() + x.tanh().double(),
    "beside zeros": lambda x: torch.zeros_like(x).maximum(x),
}


class Behind(nn.Module):
    """A function of the spikes of a unit."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.unit, self.function = ConvNormNeuron(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.unit(x))


@dataclass(frozen=True, kw_only=True)
class Of(Model):
    """A block behind a stem, and logits of whatever it gives."""

    image_size: int = 4
    time_steps: int = 2
    num_classes: int = CLASSES
    way: str = ""

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, WIDTH))
        yield layer("way", Behind((MIXING | BY_ELEMENT)[self.way]))
        yield layer("head", lambda x: torch.stack([each.mean(2) for each in x.flatten(2).sin().chunk(CLASSES, 2)], 2))


def _whole(model: Model) -> list[str]:
    return [each.name for each in describe_model(model).build(TWO) if is_whole(each.module)]


def _steps(layout: Layout) -> dict[str, RankStep | str]:
    found: dict[str, RankStep | str] = {}
    for way in (*MIXING, *BY_ELEMENT):
        try:
            found[way] = one_step(Of(way=way), layout)
        except ValueError as error:
            found[way] = str(error)
    return found


def test_blocks_that_mix_channels_are_whole_and_compute_what_one_rank_does(ranks) -> None:
    (one,), two = ranks(1, _steps, Layout()), ranks(2, _steps, Layout(tensor=2))
    refused = {way for way, step in one.items() if isinstance(step, str)}
    assert refused == {"neighbours"}  # gives no [T, N, ...]
    for way, step in one.items():
        steps = [each[way] for each in two]
        if isinstance(step, RankStep):
            assert ("way" in _whole(Of(way=way))) == (way in MIXING), way
            assert_equal(steps, [step])
        else:
            assert all(isinstance(each, str) for each in steps)


class Block(nn.Module):
    def __init__(self, *functions: Function) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x)
        return x


def test_random_blocks_are_whole_or_right_for_a_ranks_channels() -> None:
    draw, cut = random.Random(3), 0
    functions: list[Function] = [
        *(function for way, function in MIXING.items() if way not in ("outputs hidden from a dry run", "gradients")),
        *(function for function in BY_ELEMENT.values() for _ in range(6)),
        *(lambda x, a=a: x.transpose(a, -1) for a in (2, 3)),
        *(lambda x, d=d: x.mean(d, keepdim=True) for d in (0, 2, 3)),
        lambda x: x.flatten(2, 3),
        lambda x: x.flatten().view(x.shape),
    ]
    x = torch.randn(2, 3, WIDTH, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(150):
        block = Block(*draw.sample(functions, draw.randint(1, 4)))
        model = between(lambda block=block: [layer("unit", Residual(Block())), layer("block", block)], width=WIDTH)
        try:
            is_cut = "block" not in _whole(model)
        except (ValueError, RuntimeError):  # of shapes
            continue
        cut += is_cut
        parts = [block(part) for part in x.chunk(2, 2)] if is_cut else []
        assert not is_cut or torch.equal(torch.cat(parts, 2), block(x))
    assert cut > 20


class Gate(nn.Module):
    """Its factor has the shape of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = ParallelLinear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.linear(x.mean((3, 4)))[..., None, None]


class Mean(nn.Module):
    """Gives what every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = MeanLinear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[..., None, None]


class Inhibited(Integrates):
    """Each neuron is held back by the others at its place."""

    def charge(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        return super().charge(x - x.mean(1, keepdim=True), state)


class Softmax(nn.Softmax):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x


FEATURES = layer("pool", nn.AvgPool1d(3, 1, 1)), layer("space", nn.Unflatten(1, (WIDTH, 16)))
PLIF = NeuronSpec("plif", tau=2.0)
PLACES: dict[str, Callable[[], list[Layer]]] = {
    "gate": lambda: [layer("gate", Gate())],
    "inhibited": lambda: [layer("inhibited", Inhibited(WIDTH))],
    "softmax": lambda: [layer("softmax", Residual(nn.Softmax(2)))],
    "softmax of a class": lambda: [layer("softmax", Residual(Softmax(2)))],
    "function": lambda: [layer("function", lambda x: x - x.mean(2, keepdim=True))],
    # Layers of ours and torch's that are given something else than they are made for.
    "linear along pixels": lambda: [layer("flat", nn.Flatten(2)), layer("fc", megasnn.shard(nn.Linear(16, 16)))],
    "dropout of what is whole": lambda: [layer("mean", Mean()), layer("drop", ParallelDropout(0.5, "a"))],
    "time constant": lambda: [layer("mean", Mean()), layer("plif", Residual(ParallelNeuron(PLIF)))],
    "blocks": lambda: [layer("blocks", ParallelBatchNorm(WIDTH, blocks=2))],
    "pixels of signals": lambda: [layer("flat", nn.Flatten(2)), layer("pool", nn.AvgPool2d(3, 1, 1))],
    "features": lambda: [layer("flat", nn.Flatten()), *FEATURES],
    "pool of means": lambda: [
        layer("pool", nn.Sequential(MeanOverSpace(), nn.AvgPool1d(3, 1, 1))),
        layer("space", lambda x: x[..., None, None]),
    ],
}


PLACED: dict[str, Model] = {
    **{place: between(make, width=WIDTH) for place, make in PLACES.items()},
    "own forward": networks.Given(network="gates"),
    "maxformer": networks.Given(network="maxformer", image_size=16),
}


def _placed(layout: Layout) -> list[RankStep]:
    return [one_step(model, layout) for model in PLACED.values()]


def test_layers_that_are_given_what_they_are_not_made_for_compute_what_one_rank_does(ranks) -> None:
    (one,), two = ranks(1, _placed, Layout()), ranks(2, _placed, Layout(tensor=2))
    for step, *steps in zip(one, *two, strict=True):
        assert_equal(steps, [step])


@pytest.mark.parametrize("name", [each for each in MODELS])
def test_built_in_models_are_cut(name: str) -> None:
    assert _whole(MODELS[name]()) == []
