"""SEW-ResNet's dimensions (arXiv 2102.04159)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megasnn.config.checks import at_least
from megasnn.models.model import Model, layers_beside

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}  # of each stage


@dataclass(frozen=True, kw_only=True)
class SewResNet(Model):
    """SEW-ResNet's dimensions (arXiv 2102.04159); the defaults are for ImageNet."""

    name = "sew_resnet"
    marker = "layer1.0.first.conv.weight"
    layers = layers_beside(__name__)

    depth: Literal[18, 34] = 18
    """Number of layers with weights, as in ResNet-18 and ResNet-34."""
    connect: Literal["add", "and", "iand"] = "add"
    """How a block's spikes meet those of its shortcut: their sum, their product, or shortcut times (1 - spikes)."""
    width: int = 64
    """Channels of the first stage; each stage has twice as many as the one before."""
    image_size: int = 224
    """Height and width of the images."""
    num_classes: int = 1000
    """Number of classes."""

    def problems(self, tensor_parallel: int) -> list[str]:
        return super().problems(tensor_parallel) + at_least(self, 1, "width")
