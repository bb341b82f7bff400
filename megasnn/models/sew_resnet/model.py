"""SEW-ResNet (arXiv 2102.04159) in the form of SpikingJelly 2.0.0's `model.sew_resnet`, natively sharded."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn

from megasnn.layers import ConvNormNeuron, MeanLinear
from megasnn.layers.initialisers import kaiming_normal
from megasnn.layers.unit import PooledUnit
from megasnn.models.layer import Layer, layer
from megasnn.models.sew_resnet.dimensions import BLOCKS, SewResNet

_unit = partial(ConvNormNeuron, initialise=kaiming_normal)


def layers_of(model: SewResNet) -> Iterable[Layer]:
    """The stem, every block, and the head."""
    yield layer("stem", PooledUnit(model.in_channels, model.width, kernel_size=7, stride=2, initialise=kaiming_normal))
    inputs = model.width
    for stage, blocks in enumerate(BLOCKS[model.depth]):
        width = model.width * 2**stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            yield layer(f"layer{stage + 1}.{block}", SewBlock(inputs, width, stride, model.connect))
            inputs = width
    yield layer("head", MeanLinear(inputs, model.num_classes))


class SewBlock(nn.Module):
    """Two units beside a shortcut, which is a unit of its own where sizes change; spikes meet element by element
    (equation 8, table 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int, connect: str) -> None:
        super().__init__()
        self.connect = connect
        self.first = _unit(inputs, outputs, kernel_size=3, stride=stride)
        self.second = _unit(outputs, outputs, kernel_size=3)
        changes = stride != 1 or inputs != outputs
        self.shortcut = _unit(inputs, outputs, stride=stride) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.second(self.first(x))
        beside = x if self.shortcut is None else self.shortcut(x)
        if self.connect == "add":
            return beside + spikes
        return beside * (spikes if self.connect == "and" else 1.0 - spikes)
