"""SEW-ResNet (arXiv 2102.04159) as in SpikingJelly 2.0.0's `model.sew_resnet`: dimensions and layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megasnn.config.checks import Size
from megasnn.models.model import Model

if TYPE_CHECKING:
    from megasnn.layers.layer import Layer

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
"""Number of blocks of each stage, by depth."""


@dataclass(frozen=True, kw_only=True)
class SewResNet(Model):
    """SEW-ResNet's dimensions (arXiv 2102.04159); the defaults are for ImageNet."""

    name = "sew_resnet"
    marker = "layer1.0.first.conv.weight"

    depth: Literal[18, 34] = 18
    """Number of layers with weights, as in ResNet-18 and ResNet-34."""
    connect: Literal["add", "and", "iand"] = "add"
    """How a block joins its spikes with its shortcut: sum, product, or shortcut times (1 - spikes)."""
    width: Size = 64
    """Channels of the first stage, doubled at each later stage."""
    image_size: Size = 224
    num_classes: Size = 1000

    def layers(self) -> Iterable[Layer]:
        from megasnn.layers import ConvNormNeuron, MaxPool, MeanLinear
        from megasnn.layers.init import kaiming_normal
        from megasnn.layers.layer import layer
        from megasnn.models.sew_resnet.blocks import SewBlock

        inputs = self.width
        yield layer("stem", ConvNormNeuron(self.in_channels, inputs, 7, stride=2, initialise=kaiming_normal))
        yield layer("pool", MaxPool(), layer_group="stem")
        for stage, blocks in enumerate(BLOCKS[self.depth]):
            width = self.width * 2**stage
            for block in range(blocks):
                # As in ResNet: every stage but the first begins by halving the sides.
                stride = 2 if stage and not block else 1
                yield layer(f"layer{stage + 1}.{block}", SewBlock(inputs, width, stride, self.connect))
                inputs = width
        yield layer("head", MeanLinear(inputs, self.num_classes))
