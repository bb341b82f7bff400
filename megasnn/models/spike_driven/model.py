"""The Spike-driven Transformer (arXiv 2307.01694) in the form of SpikingJelly 2.0.0's `spike_driven_transformer`.

Its shortcuts join potentials and not spikes: real numbers go from block to block, and every convolution in a block has
a neuron in front of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from megasnn.layers import (
    ConvNormNeuron,
    MaxPool,
    MeanOverSpace,
    NeuronConvNorm,
    ParallelBatchNorm,
    ParallelConv,
    ParallelLinear,
    ParallelNeuron,
    SpikeDrivenAttention,
)
from megasnn.layers.unit import PooledUnit, Residual
from megasnn.models.layer import Layer, layer
from megasnn.models.spike_driven.dimensions import STEM_STAGES, SpikeDrivenTransformer


def layers_of(model: SpikeDrivenTransformer) -> Iterable[Layer]:
    """The stages of the patch stem and the positional encoding, the halves of each block, the head."""
    dim, stem = model.embed_dim, "patch_embed"
    channels = [model.in_channels, *(dim // 2 ** (STEM_STAGES - 1 - stage) for stage in range(STEM_STAGES))]
    *first, last = (pooled == "1" for pooled in model.pooled_stages)
    for stage, pools in enumerate(first):
        unit = (PooledUnit if pools else ConvNormNeuron)(channels[stage], channels[stage + 1], 3, bias=True)
        yield layer(f"{stem}.stages.{stage}", unit, unit=stem)
    yield layer(f"{stem}.last", Potential(channels[-2], dim, last), unit=stem)
    yield layer(f"{stem}.positional_encoding", Residual(NeuronConvNorm(dim, dim, 3)), unit=stem)
    for block in range(model.depth):
        name = f"blocks.{block}"
        yield layer(f"{name}.attention", Residual(SpikeDrivenAttention(dim)), unit=name)
        yield layer(f"{name}.mlp", MLP(dim, int(dim * model.mlp_ratio)), unit=name)
    yield layer("head", Head(dim, model.num_classes))


class Potential(nn.Module):
    """Convolution and norm, and perhaps max pooling, without a neuron: the potentials that the blocks begin with."""

    def __init__(self, inputs: int, outputs: int, pools: bool) -> None:
        super().__init__()
        self.conv, self.norm = ParallelConv(inputs, outputs, 3, padding=1, bias=True), ParallelBatchNorm(outputs)
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
        self.mean, self.neuron, self.linear = MeanOverSpace(), ParallelNeuron(), ParallelLinear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.neuron(self.mean(x)))
