"""Networks that a researcher brings: of plain modules, of SpikingJelly's layers given to `megasnn.shard`, and with
neurons of one's own; each beside the same one in SpikingJelly alone. One calls its layers several times."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from spikingjelly.activation_based import functional, neuron, surrogate
from spikingjelly.activation_based import layer as sj
from spikingjelly.activation_based.model.spikformer import Spikformer
from torch import Tensor, nn

import megasnn
from megasnn.layers import ConvNormNeuron, ParallelLinear
from megasnn.layers.layer import Layer, layer
from megasnn.models.model import Model
from tests.models import given_to_shard
from tests.models.networks import Bundles, Plain, Tied, UNet
from tests.models.test_own_neurons import Own
from tests.parity.beside import Case
from tests.parity.ranks import model_config
from tests.parity.spikingjelly_reference import DIMS, IMAGE_SIZE, with_other_norms
from tests.parity.zoo import CASES as ZOO

STEPS = 3


def _prepared(make: Callable[[], nn.Module]) -> nn.Module:
    """Parameters with a value for each channel are away from where they start, so that errors in them show."""
    net = with_other_norms(make)
    for module in net.modules():
        for name in ("rise", "leak", "decay", "hard"):
            if isinstance(value := getattr(module, name, None), nn.Parameter):
                nn.init.uniform_(value, 0.1, 0.5)
    functional.set_step_mode(net, "m")
    return net


def _unit(inputs: int, outputs: int, neurons: nn.Module, *pool: nn.Module) -> nn.Sequential:
    """As ConvNormNeuron is."""
    parts = OrderedDict(conv=sj.Conv2d(inputs, outputs, 3, padding=1, bias=False), norm=sj.BatchNorm2d(outputs))
    return nn.Sequential(parts | {f"pool{i}": each for i, each in enumerate(pool)} | {"neuron": neurons})


def _plain(sharded: bool) -> nn.Sequential:
    """The modules of the model `Plain`, of those that know no time SpikingJelly's."""
    parts = OrderedDict[str, nn.Module](
        conv=sj.Conv2d(3, 8, 3, padding=1), norm=sj.BatchNorm2d(8), fire=neuron.LIFNode(), pool=sj.MaxPool2d(2)
    )
    if sharded:
        parts["unit"] = _unit(8, 8, neuron.LIFNode(detach_reset=True))
    block = sj.Conv2d(8, 16, 3, padding=1, bias=False), sj.BatchNorm2d(16), neuron.LIFNode()
    rest = dict(block=nn.Sequential(*block), mean=sj.AdaptiveAvgPool2d(1), flat=sj.Flatten(), head=sj.Linear(16, 4))
    return nn.Sequential(parts | rest)


class AdaptiveNode(neuron.SimpleBaseNode):
    """AdaptiveLIF of tests/models/test_own_neurons.py, for SpikingJelly."""

    def __init__(self, channels: int) -> None:
        super().__init__(surrogate_function=surrogate.PiecewiseQuadratic(alpha=0.5))  # the triangle of half width 2
        self.rise = nn.Parameter(torch.empty(channels))
        self.register_memory("a", 0.0)

    def neuronal_charge(self, x: Tensor) -> None:
        self.v = self.v + (x - self.v) / 2

    def neuronal_fire(self) -> Tensor:
        return self.surrogate_function(self.v - 0.5 - self.rise.view(-1, 1, 1) * self.a)

    def neuronal_reset(self, spike: Tensor) -> None:
        self.v = self.v * (1 - spike.detach())
        self.a = 0.9 * self.a + spike


class GatedNode(neuron.SimpleBaseNode):
    """GatedLIF of tests/models/test_own_neurons.py, for SpikingJelly."""

    def __init__(self, channels: int) -> None:
        super().__init__(surrogate_function=surrogate.ATan())
        self.leak, self.decay, self.hard = (nn.Parameter(torch.empty(channels)) for _ in range(3))

    def neuronal_charge(self, x: Tensor) -> None:
        leak, decay = (gate.sigmoid().view(-1, 1, 1) for gate in (self.leak, self.decay))
        self.v = self.v * (1 - leak * decay) - 0.1 * (1 - leak) + x

    def neuronal_reset(self, spike: Tensor) -> None:
        hard = self.hard.sigmoid().view(-1, 1, 1)
        self.v = hard * self.v * (1 - spike) + (1 - hard) * (self.v - spike)


def _own(node: Callable[[int], nn.Module]) -> nn.Sequential:
    """The network `Own`."""
    units = dict(a=_unit(3, 8, node(8), sj.MaxPool2d(3, 2, 1)), b=_unit(8, 16, node(16)), alone=node(16))
    return nn.Sequential(
        OrderedDict(**units, mean=sj.AdaptiveAvgPool2d(1), flat=sj.Flatten(), head=sj.Linear(16, Own().num_classes))
    )


class Recurrent(nn.Module):
    """A convolution, a norm and a linear layer that a forward calls twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = sj.Conv2d(width, width, 3, padding=1), sj.BatchNorm2d(width)
        self.linear = sj.Linear(width, width)
        self.fires = nn.ModuleList(neuron.LIFNode(detach_reset=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for fire in self.fires:
            x = x + fire(self.norm(self.conv(x)))
        means = x.mean((3, 4))
        return self.linear(means + self.linear(means))


class UnitTwice(nn.Module):
    """A unit of three parts that is called on what it gave: ours, whose neurons start at rest in each call, or
    SpikingJelly's, with neurons for each call."""

    def __init__(self, unit: nn.Module, *fires: nn.Module) -> None:
        super().__init__()
        self.unit, self.fires = unit, nn.ModuleList(fires)

    def forward(self, x: Tensor) -> Tensor:
        if not self.fires:
            return x + self.unit(x + self.unit(x))
        first, second = self.fires
        return x + second(self.unit(x + first(self.unit(x))))


@dataclass(frozen=True, kw_only=True)
class CalledAgain(Model):
    """Layers of ours, and SpikingJelly's given to `shard`, that a forward calls several times."""

    image_size: int = 6
    time_steps: int = 3
    num_classes: int = 4

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, 8, 3))
        yield layer("twice", UnitTwice(ConvNormNeuron(8, 8, 3)))
        recurrent = Recurrent(8)
        functional.set_step_mode(recurrent, "m")
        yield layer("recurrent", megasnn.shard(recurrent))
        yield layer("head", ParallelLinear(8, self.num_classes))


def _called_again() -> nn.Sequential:
    def fire() -> nn.Module:
        return neuron.LIFNode(detach_reset=True)

    twice = UnitTwice(_unit(8, 8, nn.Identity()), fire(), fire())
    return nn.Sequential(
        OrderedDict(stem=_unit(3, 8, fire()), twice=twice, recurrent=Recurrent(8), head=sj.Linear(8, 4))
    )


def _spikformer_of_frames() -> nn.Module:
    sizes = dict(img_size_h=IMAGE_SIZE, img_size_w=IMAGE_SIZE, **(DIMS | {"in_channels": 2}))
    return with_other_norms(partial(Spikformer, **sizes))


def _case(model: Model, make: Callable[[], nn.Module]) -> Case:
    return Case(model, partial(_prepared, make), STEPS)


CASES = {
    "plain": _case(Plain(sharded=False), partial(_plain, False)),
    "plain-beside-ours": _case(Plain(), partial(_plain, True)),
    **{f"shard-{name}": case for name, case in given_to_shard.CASES.items()},
    "called-again": _case(CalledAgain(), _called_again),
    "adaptive": _case(Own(kind="AdaptiveLIF"), partial(_own, AdaptiveNode)),
    "gated": _case(Own(kind="GatedLIF"), partial(_own, GatedNode)),
    "event-frames": Case(replace(model_config(), in_channels=2, event_frames=True), _spikformer_of_frames),
}
MODELS: dict[str, Model] = {
    **{name: case.model for name, case in (ZOO | CASES).items()},
    "unet": UNet(),
    "bundles": Bundles(),
    "tied": Tied(),
}
"""All small models beside the Spikformer and the VGG."""
