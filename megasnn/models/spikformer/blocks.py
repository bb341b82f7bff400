"""Spikformer's blocks: a convolution and an attention, each with a shortcut."""

from __future__ import annotations

from torch import Tensor

from megasnn.layers import ConvNormNeuron, SpikingSelfAttention


class PositionalEncoding(ConvNormNeuron):
    """x + neuron(norm(conv(x))): encodes the tokens' position."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class ResidualAttention(SpikingSelfAttention):
    """x + attention(x), as `ResidualMLP` behind it has x + mlp(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)
