"""SEW-ResNet's block."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megasnn.layers import ConvNormNeuron
from megasnn.layers.init import kaiming_normal

_conv_norm_neuron = partial(ConvNormNeuron, initialise=kaiming_normal)


class SewBlock(nn.Module):
    """Two ConvNormNeurons and a shortcut, joined element by element (equation 8, table 2).

    The shortcut is a third ConvNormNeuron if sizes change.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, connect: str) -> None:
        super().__init__()
        self.connect = connect
        self.first = _conv_norm_neuron(inputs, outputs, kernel_size=3, stride=stride)
        self.second = _conv_norm_neuron(outputs, outputs, kernel_size=3)
        changes = stride != 1 or inputs != outputs
        self.shortcut = _conv_norm_neuron(inputs, outputs, stride=stride) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.second(self.first(x))
        beside = x if self.shortcut is None else self.shortcut(x)
        # Of spikes 0 and 1 the product is AND, and 1 - spikes is NOT.
        if self.connect == "add":
            return beside + spikes
        return beside * (spikes if self.connect == "and" else 1.0 - spikes)
