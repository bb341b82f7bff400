"""Script for a model of your own: `python examples/own_model.py --train-iters 100`, or under torchrun.

Without --data-path it learns scikit-learn's digits. `--help` lists all flags, with the fields of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import megasnn
from megasnn import ConvNormNeuron, MeanLinear, layer


@dataclass(frozen=True, kw_only=True)
class Small(megasnn.Model):
    """Two spiking convolutions and a linear head on the mean over space."""

    image_size: int = 8
    """Height and width of the images."""
    in_channels: int = 1
    """Channels of the images."""
    width: int = 16
    """Channels of the first layer."""

    def layers(self):
        yield layer("stem", ConvNormNeuron(self.in_channels, self.width, kernel_size=3))
        yield layer("body", ConvNormNeuron(self.width, 2 * self.width, kernel_size=3, stride=2))
        yield layer("head", MeanLinear(2 * self.width, self.num_classes))


if __name__ == "__main__":
    megasnn.pretrain(Small)
