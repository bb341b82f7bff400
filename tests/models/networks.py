"""Small spiking networks that are no chains: skips over stages, bundles of tensors, layers used more than once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from spikingjelly.activation_based import layer as sj
from spikingjelly.activation_based import neuron
from torch import Tensor, nn

from megasnn.kernels import NeuronSpec
from megasnn.layers import ConvNormNeuron, MeanLinear, ParallelDropout, SpikingNeuron
from megasnn.layers.layer import Layer, layer
from megasnn.models.model import Model

CLASSES = 4


@dataclass(frozen=True, kw_only=True)
class Between(Model):
    """Layers between a first one, which gives so many channels, and a last one. It travels to ranks where `make`, a
    function of a module or a `partial` of one, does."""

    make: ClassVar[Callable[[], Iterable[Layer]]] = tuple
    width: ClassVar[int] = 4
    image_size: int = 4
    time_steps: int = 2
    num_classes: int = CLASSES

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, self.width))
        yield from type(self).make()
        yield layer("head", MeanLinear(self.width, CLASSES))

    def __reduce__(self) -> tuple[object, ...]:
        return between, (type(self).make, self.width, self.image_size)


def between(make: Callable[[], Iterable[Layer]], width: int = 4, image_size: int = 4) -> Model:
    """A model of a class of its own: configurations hold numbers and names, and no functions."""
    made = type("Between", (Between,), {"make": staticmethod(make), "width": width})
    return dataclass(frozen=True, kw_only=True)(made)(image_size=image_size)


class Integrates(SpikingNeuron):
    """Neurons of one's own without a leak."""

    def charge(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        return state["v"] + x

    def reset(self, h: Tensor, spikes: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"v": h * (1 - spikes.detach())}


class Up(nn.Module):
    """Twice as high and wide, and the skip is added."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.unit = ConvNormNeuron(inputs, outputs)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.unit(x).repeat_interleave(2, -1).repeat_interleave(2, -2) + skip


class Pass(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class TwoTied(nn.Module):
    """Two convolutions with one weight; a plain module."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x.flatten(0, 1))).unflatten(0, x.shape[:2])


class Join(nn.Module):
    """Channels side by side; a plain module, which has all of them."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a, b], 2)


@dataclass(frozen=True, kw_only=True)
class UNet(Model):
    """Down and up again, with skips; the stem's output is used three times."""

    image_size: int = 8
    time_steps: int = 2
    num_classes: int = CLASSES
    width: int = 4

    def layers(self) -> Iterable[Layer]:
        width = self.width
        yield layer("stem", ConvNormNeuron(3, width, 3))
        yield layer("down.0", ConvNormNeuron(width, 2 * width, 3, stride=2))
        yield layer("down.1", ConvNormNeuron(2 * width, 2 * width, 3, stride=2))
        yield layer("pass", Pass(), takes="stem")
        yield layer("up.1", Up(2 * width, 2 * width), takes=("down.1", "down.0"))
        yield layer("up.0", Up(2 * width, width), takes=("up.1", "stem"))
        yield layer("join", Join(), takes=("up.0", "pass"))
        yield layer("out", ConvNormNeuron(2 * width, 2 * width, 3))
        yield layer("join.2", Join(), takes=("stem", "out"))
        yield layer("head", MeanLinear(3 * width, self.num_classes))


class Split(nn.Module):
    """Spikes, and dense values beside them; how often neurons fired needs no gradient."""

    def __init__(self, channels: int, name: str) -> None:
        super().__init__()
        self.unit, self.drive = ConvNormNeuron(channels, channels, 3), ConvNormNeuron(channels, channels)
        self.dropout = ParallelDropout(0.2, name)

    def forward(self, x: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
        before = {"spikes": x, "drive": x, "fired": x.detach()} if isinstance(x, Tensor) else x
        spikes = self.unit(before["spikes"])
        drive = self.dropout(0.5 * before["drive"] + self.drive(before["spikes"]))
        return {"drive": drive, "spikes": spikes, "fired": before["fired"] + spikes.detach()}


class Meet(nn.Module):
    def forward(self, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return x["spikes"] * x["drive"], x["fired"]


class Classify(nn.Module):
    """Logits, and beside them the mean count of spikes, which a loss may bound."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.head = MeanLinear(channels, classes)

    def forward(self, x: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"rate": x[1].flatten(3).mean(-1), "logits": self.head(x[0])}


@dataclass(frozen=True, kw_only=True)
class Bundles(Model):
    """From block to block go spikes, dense values, and counts without a gradient."""

    image_size: int = 6
    time_steps: int = 2
    num_classes: int = CLASSES
    width: int = 4

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, self.width, 3))
        for index in range(3):
            yield layer(f"block.{index}", Split(self.width, f"block.{index}"))
        yield layer("meet", Meet())
        yield layer("head", Classify(self.width, self.num_classes))


class Again(nn.Module):
    """A block with everything that has a state of its own: weights, a norm, a learned time constant, and draws."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        plif = NeuronSpec("plif", tau=2.0)
        self.unit = ConvNormNeuron(channels, channels, 3, bias=True, neuron=plif)
        self.dropout = ParallelDropout(0.2, "again")

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.unit(x) + x)


class Mix(nn.Module):
    """A linear layer along the channels; a plain module."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.movedim(2, -1)).movedim(-1, 2)


def plain_block(channels: int) -> nn.Module:
    return nn.Sequential(
        sj.Conv2d(channels, channels, 3, padding=1, step_mode="m"),
        sj.BatchNorm2d(channels, step_mode="m"),
        neuron.LIFNode(step_mode="m"),
    )


@dataclass(frozen=True, kw_only=True)
class Tied(Model):
    """A block that is used three times, its kernel once more, and a matrix that the second and the last layer share."""

    marker = "block.0.unit.conv.bias"

    image_size: int = 6
    time_steps: int = 2
    num_classes: int = CLASSES
    plain: bool = False

    def layers(self) -> Iterable[Layer]:
        width = self.num_classes
        block, mix, late = (
            plain_block(width) if self.plain else Again(width),
            Mix(width),
            ConvNormNeuron(width, width, 3),
        )
        kernel = block[0] if isinstance(block, nn.Sequential) else block.unit.conv
        head = nn.Linear(width, width)
        late.conv.weight = kernel.weight
        head.weight = mix.linear.weight
        yield layer("stem", ConvNormNeuron(3, width, 3))
        yield layer("mix", mix)
        yield layer("block.0", block)
        yield layer("block.1", block)
        yield layer("between", ConvNormNeuron(width, width))
        yield layer("block.2", block)
        if not self.plain:
            yield layer("late", late)
        yield layer("mean", nn.AdaptiveAvgPool2d(1))
        yield layer("flat", nn.Flatten())
        yield layer("head", head)


@dataclass(frozen=True, kw_only=True)
class Plain(Model):
    """Nothing in it knows of MegaSNN, but one unit in the middle."""

    image_size: int = 8
    time_steps: int = 3
    num_classes: int = CLASSES
    width: int = 8
    sharded: bool = True

    def layers(self) -> Iterable[Layer]:
        yield layer("conv", nn.Conv2d(3, self.width, 3, padding=1))
        yield layer("norm", nn.BatchNorm2d(self.width))
        yield layer("fire", neuron.LIFNode(step_mode="m"))
        yield layer("pool", nn.MaxPool2d(2))
        if self.sharded:
            yield layer("unit", ConvNormNeuron(self.width, self.width, 3))
        yield layer(
            "block",
            nn.Sequential(
                sj.Conv2d(self.width, 2 * self.width, 3, padding=1, bias=False, step_mode="m"),
                sj.BatchNorm2d(2 * self.width, step_mode="m"),
                neuron.LIFNode(step_mode="m"),
            ),
        )
        yield layer("mean", nn.AdaptiveAvgPool2d(1))
        yield layer("flat", nn.Flatten())
        yield layer("head", nn.Linear(2 * self.width, self.num_classes))


class Sum(nn.Module):
    def forward(self, *xs: Tensor) -> Tensor:
        total = xs[0]
        for x in xs[1:]:
            total = total + x
        return 0.7 * total


class Same(nn.Module):
    """An input as it is, beside others."""

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        return x, others[0] if others else x


class First(nn.Module):
    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return 0.5 * x[0] + x[1]


@dataclass(frozen=True, kw_only=True)
class Random(Model):
    """Layers that take what earlier ones gave, as it is drawn; one unit is used again and again."""

    image_size: int = 4
    time_steps: int = 2
    num_classes: int = CLASSES
    seed: int = 0

    def layers(self) -> Iterable[Layer]:
        draw, unit = random.Random(self.seed), ConvNormNeuron(4, 4, 3)
        yield layer("stem", ConvNormNeuron(3, 4))
        names, unused = ["stem"], ["stem"]

        def some(most: int) -> list[str]:
            chosen = [draw.choice(draw.choice([names, unused or names])) for _ in range(draw.randint(1, most))]
            unused[:] = [name for name in unused if name not in chosen]
            return chosen

        for number in range(draw.randint(4, 10)):
            name = f"layer.{number}"
            match draw.choice(["conv", "again", "sum", "sum", "same"]):
                case "conv":
                    yield layer(name, ConvNormNeuron(4, 4), takes=some(1))
                case "again":
                    yield layer(name, unit, takes=some(1))
                case "sum":
                    yield layer(name, Sum(), takes=some(3))
                case "same":
                    yield layer(f"same.{number}", Same(), takes=some(2))
                    yield layer(name, First())
            names.append(name)
            unused.append(name)
        yield layer("all", Sum(), takes=unused)
        yield layer("head", MeanLinear(4, CLASSES))
