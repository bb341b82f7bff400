"""Spikformer's blocks: a convolution and an attention, each with a shortcut."""

from __future__ import annotations

from torch import Tensor

from megasnn.layers import ConvNormNeuron, SpikingSelfAttention


class PositionalEncoding(ConvNormNeuron):
    """x + neuron(norm(conv(x))): encodes the tokens' position."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class AttentionHalf(SpikingSelfAttention):
    """A block's first half: x + attention(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)
