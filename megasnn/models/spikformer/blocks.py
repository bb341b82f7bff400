"""Blocks of Spikformer: a convolution and an attention, each with a shortcut."""

from __future__ import annotations

from torch import Tensor

from megasnn.layers import ConvNormNeuron, SpikingSelfAttention


class PositionalEncoding(ConvNormNeuron):
    """x + neuron(norm(conv(x))): a convolution that encodes the position of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class AttentionHalf(SpikingSelfAttention):
    """The first half of a block: x + attention(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)
