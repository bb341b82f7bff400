"""Small networks of torch's and SpikingJelly's layers, written without a thought of MegaSNN, and models that give them
to `megasnn.shard`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from spikingjelly.activation_based import functional, neuron, surrogate
from spikingjelly.activation_based import layer as sj
from spikingjelly.activation_based.model.maxformer import MaxFormer
from torch import Tensor, nn

import megasnn
from megasnn.layers import ConvNormNeuron
from megasnn.layers.layer import Layer, layer
from megasnn.models.model import Model
from tests.models.networks import CLASSES
from tests.parity.beside import Case

TIME = 3


class VGGBlock(nn.Module):
    """As in SpikingJelly's CIFAR10DVSVGG."""

    def __init__(self, inputs: int, outputs: int, pooled: bool) -> None:
        super().__init__()
        pool = [sj.AvgPool2d(2)] if pooled else []
        self.proj_bn = nn.Sequential(*pool, sj.Conv2d(inputs, outputs, 3, 1, 1), sj.BatchNorm2d(outputs))
        self.neuron = neuron.LIFNode(
            tau=1.333, decay_input=False, detach_reset=True, surrogate_function=surrogate.ATan(), step_mode="m"
        )

    def forward(self, x_seq: Tensor) -> Tensor:
        return self.neuron(self.proj_bn(x_seq))


def vgg() -> nn.Sequential:
    features = nn.Sequential(VGGBlock(2, 8, False), VGGBlock(8, 16, True), sj.MaxPool2d(2))
    parts = OrderedDict(
        features=features,
        flat=sj.Flatten(),
        hidden=sj.Linear(16 * 2 * 2, 24),
        fire=neuron.IFNode(v_reset=None, surrogate_function=surrogate.Erf(alpha=1.5)),
        head=sj.Linear(24, CLASSES),
    )
    return functional.set_step_mode(net := nn.Sequential(parts), "m") or net


class Block(nn.Module):
    """A residual block that is cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = sj.Conv2d(width, width, (3, 2), stride=2, padding=1, bias=False)
        self.norm1 = sj.BatchNorm2d(width)
        self.fire1 = neuron.LIFNode(v_threshold=0.7, v_reset=-0.1)
        around = {"padding": "same", "padding_mode": "circular"}
        self.depthwise = sj.Conv2d(width, width, 3, dilation=2, groups=width, **around)
        self.fire2 = neuron.ParametricLIFNode(init_tau=1.5, surrogate_function=surrogate.S2NN())
        self.shortcut = sj.SeqToANNContainer(nn.Conv2d(width, width, (1, 1), 2), nn.BatchNorm2d(width))
        self.fire3 = neuron.IFNode()

    def forward(self, x: Tensor) -> Tensor:
        y = self.fire2(self.depthwise(self.fire1(self.norm1(self.down(x)))))
        return y + self.fire3(self.shortcut(x))


class Up(nn.Module):
    """Parts that no table knows, which are whole with all around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = sj.Conv2d(width, width, 3, padding=1, padding_mode="circular", bias=False)
        self.norm = sj.GroupNorm(4, width)
        self.fire = neuron.ParametricLIFNode()
        self.up = sj.ConvTranspose2d(width, width, 2)
        self.norm3 = nn.LayerNorm([width, 5, 5])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm3(self.up(self.fire(self.norm(self.conv(x)))))


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fire = neuron.LIFNode(step_mode="m")
        self.fc = sj.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fire(x).mean((3, 4)))


def residual() -> nn.Sequential:
    stem = nn.Sequential(
        sj.Conv2d(3, 8, 3, padding=1, bias=False),
        sj.ThresholdDependentBatchNorm2d(1.0, 0.9, 8),
        neuron.LIFNode(detach_reset=True),
        sj.AdaptiveAvgPool2d((7, 7)),
    )
    parts = OrderedDict(stem=stem, block=Block(8), up=Up(8), head=Head(8))
    return functional.set_step_mode(net := nn.Sequential(parts), "m") or net


def signals() -> nn.Sequential:
    """On `[T, N, C, L]`."""
    unit = OrderedDict(
        conv=sj.Conv1d(8, 16, 3, padding=1, bias=False),
        norm=sj.BatchNorm1d(16),
        neuron=neuron.LIFNode(detach_reset=True),
    )
    parts = OrderedDict(
        conv=sj.Conv1d(2, 8, 5, padding=2),
        norm=sj.BatchNorm1d(8),
        fire=neuron.LIFNode(),
        pool=sj.MaxPool1d(2),
        unit=nn.Sequential(unit),
        mean=sj.AdaptiveAvgPool1d(1),
        flat=sj.Flatten(),
        head=sj.Linear(16, CLASSES),
    )
    return functional.set_step_mode(net := nn.Sequential(parts), "m") or net


def rest() -> nn.Sequential:
    """What no other network has: containers, neurons that are none of ours, and layers that mix channels."""
    parts = OrderedDict(
        stem=sj.SeqToANNContainer(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2)),
        steps=sj.MultiStepContainer(neuron.IFNode(), sj.Conv2d(8, 8, 1), sj.BatchNorm2d(8)),
        counts=neuron.ILIFNode(),
        conv=sj.Conv2d(8, 8, 3, padding=1),
        mixing=sj.SeqToANNContainer(nn.LocalResponseNorm(3, alpha=1.0), nn.InstanceNorm2d(8, affine=True), nn.PReLU(8)),
        through_time=sj.BatchNormThroughTime2d(TIME, 8),
        fire=neuron.LIFNode(surrogate_function=surrogate.PiecewiseLeakyReLU()),
        mean=sj.AdaptiveAvgPool2d(1),
        flat=sj.Flatten(),
        votes=sj.Linear(8, 3 * CLASSES),  # which do not divide by 8 ranks
        elect=neuron.IFNode(),
        head=sj.VotingLayer(3),
    )
    net = nn.Sequential(parts)
    for module in net.children():
        if hasattr(module, "step_mode"):
            module.step_mode = "m"
    return net


def maxformer() -> nn.Sequential:
    """SpikingJelly's MaxFormer (CIFAR), whose attention joins channels by reshaping; two blocks with attention."""
    net = MaxFormer(TIME, num_classes=CLASSES, embed_dims=64, depths=(1, 1, 2), mlp_ratio=2.0, cifar=True)
    parts = OrderedDict[str, nn.Module]()
    for stage in (1, 2, 3):
        parts[f"patch_embed{stage}"] = getattr(net, f"patch_embed{stage}")
        parts |= {f"stage{stage}{number}": block for number, block in enumerate(getattr(net, f"stage{stage}"))}
    return functional.set_step_mode(net := nn.Sequential(parts | {"head": Head(64)}), "m") or net


class Gate(nn.Module):
    """Channels weighed by each other, by a matrix of all of them, and by a linear layer on their means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = sj.Conv2d(width, width, 3, padding=1), sj.BatchNorm2d(width)
        self.fire, self.fc = neuron.LIFNode(), sj.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fire(self.norm(self.conv(x)))
        rows = y.flatten(3)
        mixed = (rows @ rows.transpose(2, 3)).softmax(-1) @ rows
        return x + mixed.view_as(y) * torch.sigmoid(self.fc(y.mean((3, 4))))[..., None, None]


def gates() -> nn.Sequential:
    parts = OrderedDict(stem=sj.Conv2d(3, 8, 3, padding=1), gate=Gate(8), head=Head(8))
    return functional.set_step_mode(net := nn.Sequential(parts), "m") or net


def odd() -> nn.Sequential:
    """Channels that do not divide by two ranks."""
    parts = OrderedDict(
        stem=sj.Conv2d(3, 5, 3, padding=1),
        norm=sj.BatchNorm2d(5),
        fire=neuron.ParametricLIFNode(),
        wide=sj.Conv2d(5, 8, 3, padding=1),
        deep=sj.BatchNorm2d(8),
        narrow=sj.Conv2d(8, 3, 1),
        head=Head(3),
    )
    return functional.set_step_mode(net := nn.Sequential(parts), "m") or net


@dataclass(frozen=True, kw_only=True)
class Given(Model):
    """Images; a layer of each part of a network by its name in this module."""

    image_size: int = 8
    time_steps: int = TIME
    num_classes: int = CLASSES
    network: str = ""

    def layers(self) -> Iterable[Layer]:
        yield from megasnn.shard(globals()[self.network]())


class Dropping(Given):
    """Dropout of all kinds: torch's on frames, torch's on all time steps, in what is whole, and SpikingJelly's."""

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", megasnn.shard(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.3))))
        parts = (sj.Conv2d(8, 8, 3, step_mode="m"), nn.Dropout(0.2), neuron.LIFNode(step_mode="m"))
        yield layer("block", megasnn.shard(nn.Sequential(*parts, sj.Dropout(0.4, step_mode="m"))))
        yield layer("plain", nn.Sequential(nn.GroupNorm(2, 8), nn.Dropout(0.3)))
        yield layer("head", megasnn.shard(Head(8)))


class Vgg(Given):
    """Events."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        return TIME, 2, 8, 8


class Residual(Given):
    """Whole blocks as layers."""

    def layers(self) -> Iterable[Layer]:
        net = residual()
        for name, part in net.named_children():
            yield layer(name, megasnn.shard(part))


class MaxFormerOfParts(Given):
    """The blocks that join channels are plain modules."""

    def layers(self) -> Iterable[Layer]:
        for name, part in maxformer().named_children():
            yield layer(name, part if name.startswith("stage3") else megasnn.shard(part))


class Signals(Given):
    """Signals; one layer of ours among those of SpikingJelly."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        return 2, 12

    def layers(self) -> Iterable[Layer]:
        for each in super().layers():
            if not each.name.startswith("unit."):
                yield each
            elif each.name == "unit.conv":
                yield layer("unit", ConvNormNeuron(8, 16, 3, dims=1))


def _prepared(make: Callable[[], nn.Module]) -> nn.Module:
    """In float64, with norm parameters away from their initial values."""
    torch.manual_seed(1)
    net = make().double()
    for path, parameter in net.named_parameters():
        if parameter.ndim == 1 or "norm" in path:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return net


def _case(model: Model, make: Callable[[], nn.Module]) -> Case:
    return Case(model, partial(_prepared, make), steps=3, scale=2.0)


CASES = {
    "vgg": _case(Vgg(network="vgg"), vgg),
    "residual": _case(Residual(), residual),
    "signals": _case(Signals(network="signals"), signals),
    "rest": _case(Given(network="rest"), rest),
    # Neurons of what is whole are on every rank, which counts their spikes.
    "maxformer": replace(_case(MaxFormerOfParts(image_size=16), maxformer), counts=False),
    "odd": replace(_case(Given(network="odd"), odd), counts=False),
}
