"""SEW-ResNet (arXiv 2102.04159) in the form of SpikingJelly 2.0.0's `model.sew_resnet`: its dimensions and layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megasnn.config.checks import Size
from megasnn.models.model import Model

if TYPE_CHECKING:
    from megasnn.layers.layer import Layer

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}  # of each stage


@dataclass(frozen=True, kw_only=True)
class SewResNet(Model):
    """SEW-ResNet's dimensions (arXiv 2102.04159); the defaults are for ImageNet."""

    name = "sew_resnet"
    marker = "layer1.0.first.conv.weight"

    depth: Literal[18, 34] = 18
    """Number of layers with weights, as in ResNet-18 and ResNet-34."""
    connect: Literal["add", "and", "iand"] = "add"
    """How a block's spikes meet those of its shortcut: their sum, their product, or shortcut times (1 - spikes)."""
    width: Size = 64
    """Channels of the first stage; each stage has twice as many as the one before."""
    image_size: Size = 224
    num_classes: Size = 1000

    def layers(self) -> Iterable[Layer]:
        """The stem, every block, and the head."""
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
                stride = 2 if stage and not block else 1
                yield layer(f"layer{stage + 1}.{block}", SewBlock(inputs, width, stride, self.connect))
                inputs = width
        yield layer("head", MeanLinear(inputs, self.num_classes))
