"""Spikformer (arXiv 2209.15425) in the form of SpikingJelly 2.0.0's `model.spikformer`, natively sharded.

Same weights in, same logits and gradients out. Between layers the stream is `[T, N, C, H, W]`: spikes inside the patch
stem, after it sums of spikes, which are at most 2 + 2 * depth. All layers are cut by channel, so what a rank holds of
the stream is its own channels, and residual additions are local.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import Tensor

from megasnn.layers import ConvNormNeuron, MeanLinear, SpikingSelfAttention
from megasnn.layers.initialisers import trunc_normal, zeros
from megasnn.layers.unit import ResidualMLP
from megasnn.models.layer import Layer, layer
from megasnn.models.spikformer.dimensions import STEM_STAGES, Spikformer


def layers_of(model: Spikformer) -> Iterable[Layer]:
    """The stages of the patch stem and the positional encoding, the two halves of each block, the head."""
    dim, stem = model.embed_dim, "patch_embed"
    channels = [model.in_channels, *(dim // 2 ** (STEM_STAGES - 1 - stage) for stage in range(STEM_STAGES))]
    conv3x3 = partial(ConvNormNeuron, kernel_size=3, initialise=trunc_normal)
    for stage in range(STEM_STAGES):
        pools = stage >= (2 if model.patch_size == 4 else 0)
        unit = conv3x3(channels[stage], channels[stage + 1], max_pool=pools)
        yield layer(f"{stem}.stages.{stage}", unit, unit=stem)
    positional = PositionalEncoding(dim, dim, kernel_size=3, initialise=trunc_normal)
    yield layer(f"{stem}.positional_encoding", positional, unit=stem)
    for block in range(model.depth):
        name = f"blocks.{block}"
        yield layer(f"{name}.attention", AttentionHalf(dim, model.num_heads, initialise=trunc_normal), unit=name)
        yield layer(f"{name}.mlp", ResidualMLP(dim, model.mlp_dim, initialise=trunc_normal), unit=name)
    head = MeanLinear(dim, model.num_classes, initialise=trunc_normal, initialise_bias=zeros)
    yield layer("head", head)


class PositionalEncoding(ConvNormNeuron):
    """x + neuron(norm(conv(x))): the convolution that tells tokens apart by their place."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class AttentionHalf(SpikingSelfAttention):
    """The first half of a block: x + attention(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)
