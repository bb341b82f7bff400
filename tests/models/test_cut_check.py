"""Check of cut layers on real ranks: what is accepted computes the same with a rank's channels."""

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
from megasnn.kernels import NeuronSpec
from megasnn.layers import (
    BuildContext,
    ConvNormNeuron,
    MeanLinear,
    ParallelBatchNorm,
    ParallelDropout,
    ParallelLinear,
    ParallelNeuron,
    apply_layer,
)
from megasnn.layers.context import building
from megasnn.layers.shape_inference import MaxInference
from megasnn.models.build import describe
from megasnn.models.cut_check import MixedChannels, check_cut_layers, cut_by_shape, difference, fill
from megasnn.models.layer import Layer, layer
from megasnn.models.model import Model
from megasnn.models.registry import MODELS
from megasnn.parallel.sharding import Cut
from megasnn.parallel_state import Group, alone
from tests.distributed.whole import context, everybody
from tests.models import given_to_shard as networks
from tests.models.networks import between

CPU = torch.device("cpu")
SHAPE = (2, 3, 8, 4, 6)
Function = Callable[[Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, *functions: Function) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x)
        return x


class Behind(nn.Module):
    """A function of the spikes of a unit, which real ranks compute."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.unit, self.function = ConvNormNeuron(SHAPE[2], SHAPE[2]), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.unit(x))


def assert_same(block: nn.Module, x: Tensor) -> None:
    """Each of two ranks computes its part, in the one dimension that is shorter, of what one rank does."""
    whole = block(x)
    for rank, part in enumerate(map(block, x.chunk(2, 2))):
        cut = cut_by_shape(part, whole, 2)
        expected = whole if cut is None else whole.chunk(2, cut.dim)[rank]
        assert torch.allclose(part, expected, rtol=1e-12, atol=1e-12)


# Ways to mix channels [T, N, C, H, W]; each gave other numbers with tensor parallelism, or was refused by its name.
def shuffle(x: Tensor, groups: int = 2) -> Tensor:
    return x.view(*x.shape[:2], groups, -1, *x.shape[3:]).transpose(2, 3).reshape(x.shape)


def attention(x: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    rows = x.flatten(3).flatten(0, 1)  # [T * N, C, H * W]
    return product(product(rows, rows.transpose(1, 2)).softmax(-1), rows).view(x.shape)


MIXING: dict[str, Function] = {
    "shuffle": shuffle,
    "shuffle by permute": lambda x: x.unflatten(2, (2, -1)).permute(0, 1, 3, 2, 4, 5).flatten(2, 3),
    "attention by matmul": lambda x: attention(x, torch.matmul),
    "attention by bmm": lambda x: attention(x, torch.bmm),
    "scaled dot product": lambda x: F.scaled_dot_product_attention(x.flatten(3), x.flatten(3), x.flatten(3)),
    "chunk": lambda x: torch.cat(x.chunk(2, 2)[::-1], 3),
    "unbind": lambda x: x.unbind(2)[0],
    "softmax": lambda x: x.softmax(2),
    "softmax behind permute": lambda x: x.permute(0, 1, 3, 4, 2).softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "group norm": lambda x: F.group_norm(x.flatten(0, 1), 2).view(x.shape),
    "normalize": lambda x: F.normalize(x, dim=2),
    "norm": lambda x: x / x.norm(dim=2, keepdim=True),
    "cosine": lambda x: F.cosine_similarity(x, x + 1, dim=2).unsqueeze(2) * x,
    "glu": lambda x: F.glu(x, 2),
    "logsumexp": lambda x: x - x.logsumexp(2, keepdim=True),
    "first channel": lambda x: x * x[..., :1, :, :],
    "selected": lambda x: x - x.select(2, 0).unsqueeze(2),
    "index": lambda x: x[:, :, [0]] + x,
    "mean of all": lambda x: x - x.mean(),
    "mean": lambda x: x - x.mean(2, keepdim=True),
    "sum": lambda x: x.sum(2),
    "largest": lambda x: x / x.amax(2, keepdim=True),
    "largest with index": lambda x: x - x.max(2, keepdim=True).values,
    "cumulated": lambda x: x.cumsum(2),
    "flipped": lambda x: x.flip(2),
    "rolled flat": lambda x: x.roll(1),
    "padded": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)),
    "neighbours": lambda x: F.avg_pool1d(x.flatten(0, 1).flatten(2).transpose(1, 2), 3, 1, 1),
    "tokens of another size": lambda x: x.reshape(*x.shape[:2], -1, 4).softmax(2),
    "joined": lambda x: torch.cat((x, x), 2).softmax(3).sum(2),
    "outer product": lambda x: x.mean((3, 4)).unsqueeze(-1) * x.mean((3, 4)).unsqueeze(-2),
    "number of channels": lambda x: x * x.shape[2] ** -0.5,
    "number of elements": lambda x: x / x.numel(),
    "numbered": lambda x: x * torch.arange(x.shape[2], device=x.device).view(-1, 1, 1),
    "heads of other channels": lambda x: x.flatten(3).unflatten(2, (2, -1)).softmax(3),
    "distance": lambda x: torch.cdist(x.flatten(3), x.flatten(3)),
    "mean in place": lambda x: x.clone().sub_(x.mean(2, keepdim=True)),
}


# What is right for a rank's channels, wherever they have come to.
RIGHT: dict[str, Function] = {
    "tokens": lambda x: x.flatten(3).softmax(3),
    "tokens first": lambda x: x.flatten(3).flatten(0, 1).transpose(1, 2).softmax(1),
    "heads": lambda x: x.flatten(3).unflatten(2, (-1, 2)).transpose(3, 4).softmax(3),
    "attention of heads": lambda x: attention_of_heads(x),
    "attention of torch": lambda x: F.scaled_dot_product_attention(*[x.flatten(3).unflatten(2, (-1, 2))] * 3),
    "over space": lambda x: x - x.mean((3, 4), keepdim=True),
    "over time": lambda x: x - x.amax(0, keepdim=True),
    "normalized space": lambda x: F.normalize(x.flatten(3), dim=3),
    "pools": lambda x: F.max_pool2d(F.avg_pool2d(x.flatten(0, 1), 2), 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x.flatten(0, 1), 1).flatten(1),
    "interpolated": lambda x: F.interpolate(x.flatten(0, 1), scale_factor=2),
    "time step": lambda x: torch.stack([x[0], x[1] * x[0]]),
    "in place": lambda x: x.clone().mul_(2).add_(torch.ones(())),
    "written": lambda x: written(x),
    "chosen": lambda x: torch.where(x > 0, x, 0.5),
    "flipped": lambda x: x.flip(3).roll(1, 0),
    "joined in space": lambda x: torch.cat((x, x), 3),
    "double": lambda x: x.to(torch.float64),
    "every second": lambda x: x[:, :, ::2],
    "unfolded": lambda x: F.unfold(x.flatten(0, 1), 3, padding=1),
    "pixel unshuffle": lambda x: F.pixel_unshuffle(x.flatten(0, 1), 2),
    "interpolated channels": lambda x: F.interpolate(x.flatten(3).flatten(0, 1).transpose(1, 2), scale_factor=2),
    "permuted": lambda x: x.permute(2, 0, 1, 4, 3).contiguous(),
}


def attention_of_heads(x: Tensor) -> Tensor:
    heads = x.flatten(3).unflatten(2, (-1, 2)).transpose(-1, -2)  # [T, N, heads, L, 2]
    return ((heads @ heads.transpose(-1, -2)).softmax(-1) @ heads).transpose(3, 4).reshape(x.shape)


def written(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for time in range(len(x)):
        y[time] = x[time] + y[time - 1]
    return y


def _ways() -> dict[str, list[str | None]]:
    """What differs in each way, by itself on dense numbers and behind a unit on its spikes."""
    found = {}
    for way, function in {**MIXING, **{f"right: {way}": function for way, function in RIGHT.items()}}.items():
        block = Block(function, torch.sin)
        found[way] = [_differs(block, block), _differs(*_built(lambda function=function: Behind(function)))]
    return found


def _built(make: Callable[[], nn.Module]) -> list[nn.Module]:
    layers = []
    for group in alone("tp"), everybody():
        with building(context(group)):
            layers.append(make())
        with MaxInference():
            apply_layer(layers[-1], torch.empty(SHAPE, device="meta").chunk(group.size, 2)[0], None)
        fill("a", layers[-1], CPU)
    return layers


def _differs(reference: nn.Module, block: nn.Module) -> str | None:
    given = torch.empty(SHAPE, device="meta", requires_grad=True)
    try:
        return difference(reference, block, [given], [Cut(2)], everybody(), CPU)
    except (RuntimeError, ValueError, IndexError) as error:  # of shapes
        return str(error)


def test_what_mixes_channels_is_found_and_nothing_else(ranks) -> None:
    first, second = ranks(2, _ways)
    for way in first:
        for one, other in zip(first[way], second[way], strict=True):
            assert ((one or other) is None) == way.startswith("right: "), (way, one, other)


FUNCTIONS: list[Function] = [
    *MIXING.values(),
    *RIGHT.values(),
    *(lambda x, a=a, b=b: x.transpose(a, b) for a in range(3) for b in (-1, -2)),
    *(lambda x, d=d: x.softmax(d) for d in range(-3, 3)),
    *(lambda x, d=d: x.mean(d) for d in range(-3, 3)),
    *(lambda x, d=d: x.flatten(d, d + 1) for d in range(3)),
    *(lambda x, d=d, n=n: x.unflatten(d, n) for d in range(4) for n in ((2, -1), (-1, 2))),
    lambda x: x.reshape(SHAPE) if x.numel() == torch.Size(SHAPE).numel() else x,
    lambda x: x.unsqueeze(2),
    lambda x: x.squeeze(),
    lambda x: x.movedim(0, -1),
    lambda x: x @ x.mT,
    lambda x: x.flatten().view(x.shape),
]


def _random_blocks() -> list[list[int]]:
    draw = random.Random(3)
    return [draw.sample(range(len(FUNCTIONS)), draw.randint(1, 4)) for _ in range(400)]


def _accepted() -> list[bool]:
    found = []
    for numbers in _random_blocks():
        block = Block(*(FUNCTIONS[number] for number in numbers))
        found.append(_differs(block, block) is None)
    return found


def test_blocks_of_random_functions_are_refused_or_the_same(ranks) -> None:
    x = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    accepted = [all(verdicts) for verdicts in zip(*ranks(2, _accepted), strict=True)]
    assert sum(accepted) > 20
    for numbers, is_accepted in zip(_random_blocks(), accepted, strict=True):
        if is_accepted:
            assert_same(Block(*(FUNCTIONS[number] for number in numbers)), x)


class MixedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(2, keepdim=True)


HIDDEN: dict[str, Function] = {
    "outputs": lambda x: x if x.is_meta else x - x.mean(2, keepdim=True),
    "gradients": MixedBackward.apply,
}
"""What the meta device does not show."""


class Hiding(ConvNormNeuron):
    def __init__(self, way: str) -> None:
        super().__init__(4, 4)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return HIDDEN[self.way](super().forward(x))


@dataclass(frozen=True, kw_only=True)
class Hidden(Model):
    image_size: int = 4
    time_steps: int = 2
    num_classes: int = 4
    way: str = ""

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, 4))
        yield layer("hiding", Hiding(self.way))
        yield layer("head", MeanLinear(4, self.num_classes))


class Gate(nn.Module):
    """Its factor has the shape of one channel, and its gradient that of all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = ParallelLinear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.linear(x.mean((3, 4)))[..., None, None]


class Mean(nn.Module):
    """Gives what every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = MeanLinear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[..., None, None]


FEATURES = layer("pool", nn.AvgPool1d(3, 1, 1)), layer("space", nn.Unflatten(1, (8, 16)))
MODELS_THAT_MIX: dict[str, tuple[Model, str]] = {
    **{f"hidden {way}": (Hidden(way=way), "hiding: ") for way in HIDDEN},
    "gate": (between(lambda: [layer("gate", Gate())], width=8), "gate: gradients"),
    # Layers of ours and torch's that are given something else than they are made for.
    "linear along pixels": (
        between(lambda: [layer("flat", nn.Flatten(2)), *_shared("fc", nn.Linear(16, 16))], width=8),
        "fc: ",
    ),
    "dropout of what is whole": (
        between(lambda: [layer("mean", Mean()), layer("drop", ParallelDropout(0.5, "a"))], width=8),
        "drop: ",
    ),
    "time constant of what is whole": (
        between(lambda: [layer("mean", Mean()), layer("plif", ParallelNeuron(NeuronSpec("plif", tau=2.0)))], width=8),
        "plif: ",
    ),
    "blocks": (between(lambda: [layer("norm", ParallelBatchNorm(8, blocks=2))], width=8), "norm: "),
    "pixels of signals": (
        between(lambda: [layer("flat", nn.Flatten(2)), layer("pool", nn.AvgPool2d(3, 1, 1))], width=8),
        "pool: ",
    ),
    "own forward": (networks.Given(network="gates"), "gate: "),
    "maxformer": (networks.Given(network="maxformer", image_size=16), "stage3"),
    "features": (between(lambda: [layer("flat", nn.Flatten()), *FEATURES], width=8), "pool: "),
}


def _shared(name: str, module: nn.Module) -> list[Layer]:
    return [layer(name, megasnn.shard(module))]


def _checked(model: Model) -> None:
    described, own = describe(model), BuildContext(everybody())
    built = described.build(own)
    check_cut_layers(described, own, built, range(len(built)), CPU)


def _problems() -> dict[str, str]:
    found = {}
    for name, (model, _) in MODELS_THAT_MIX.items():
        try:
            _checked(model)
        except MixedChannels as error:
            found[name] = str(error)
    return found


def test_what_layers_hide_or_are_not_made_for_is_found(ranks) -> None:
    first, second = ranks(2, _problems)
    assert first.keys() == MODELS_THAT_MIX.keys() and first == second
    for name, (_, text) in MODELS_THAT_MIX.items():
        assert first[name].startswith(text) and "--tensor-model-parallel-size 2" in first[name], name


@pytest.mark.parametrize("name", [each for each in MODELS])
def test_built_in_models_are_not_run(name: str) -> None:
    """A group without processes could not."""
    described, own = describe(MODELS[name]()), BuildContext(Group("tp", (0, 1)))
    built = described.build(own)
    check_cut_layers(described, own, built, range(len(built)), CPU)
