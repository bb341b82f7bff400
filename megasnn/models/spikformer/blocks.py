"""Blocks of Spikformer: a unit and an attention with a shortcut."""

from __future__ import annotations

from torch import Tensor

from megasnn.layers import ConvNormNeuron, SpikingSelfAttention


class PositionalEncoding(ConvNormNeuron):
    """x + neuron(norm(conv(x))): the convolution that tells tokens apart by their place."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class AttentionHalf(SpikingSelfAttention):
    """The first half of a block: x + attention(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)
