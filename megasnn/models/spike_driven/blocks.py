"""Blocks of the Spike-driven Transformer, between which potentials go."""

from __future__ import annotations

from torch import Tensor, nn

from megasnn.layers import (
    MaxPool,
    MeanOverSpace,
    NeuronConvNorm,
    ParallelBatchNorm,
    ParallelConv,
    ParallelLinear,
)
from megasnn.layers.neuron import make_neuron


class Potential(nn.Module):
    """Convolution and norm, and perhaps max pooling, without a neuron: the potentials that the blocks begin with."""

    def __init__(self, inputs: int, outputs: int, pools: bool) -> None:
        super().__init__()
        self.conv = ParallelConv(inputs, outputs, 3, padding=1, bias=True, pooled_behind=pools)
        self.norm = ParallelBatchNorm(outputs)
        self.pool = MaxPool() if pools else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.norm(self.conv(x)))


class MLP(nn.Module):
    """x + fc2(fc1(x)), pointwise over tokens; with as many hidden channels as others, fc1 has a shortcut too."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = NeuronConvNorm(dim, hidden, bias=True), NeuronConvNorm(hidden, dim, bias=True)
        self.shortcut = dim == hidden

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        if self.shortcut:
            x = y = y + x
        return self.fc2(y) + x


class Head(nn.Module):
    """Mean over the tokens, neurons, and a linear layer: potentials -> logits `[T, N, num_classes]`."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.mean, self.neuron, self.linear = MeanOverSpace(), make_neuron(), ParallelLinear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.neuron(self.mean(x)))
