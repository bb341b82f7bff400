"""Blocks of the Spike-driven Transformer, which exchange potentials."""

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
    """Convolution, norm and perhaps max pooling, without a neuron: the first potentials."""

    def __init__(self, inputs: int, outputs: int, pools: bool) -> None:
        super().__init__()
        # `pooled_behind`: equal values stay equal over a border between ranks, and ties break as on one rank.
        self.conv = ParallelConv(inputs, outputs, 3, padding=1, bias=True, pooled_behind=pools)
        self.norm = ParallelBatchNorm(outputs)
        self.pool = MaxPool() if pools else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.norm(self.conv(x)))


class MLP(nn.Module):
    """x + fc2(fc1(x)), pointwise over tokens; fc1 has a shortcut too at equal numbers of channels."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = NeuronConvNorm(dim, hidden, bias=True)
        self.fc2 = NeuronConvNorm(hidden, dim, bias=True)
        self.shortcut = dim == hidden

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        if self.shortcut:
            y = y + x
            x = y
        return self.fc2(y) + x


class Head(nn.Module):
    """Mean over tokens, neurons, and a linear layer: potentials -> logits `[T, N, num_classes]`."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.mean = MeanOverSpace()
        self.neuron = make_neuron()
        self.linear = ParallelLinear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.neuron(self.mean(x)))
