"""Spikformer (arXiv 2209.15425) as in SpikingJelly 2.0.0's `model.spikformer`: dimensions and layers.

Equal weights give equal logits and gradients. Layers exchange `[T, N, C, H, W]`: spikes inside the patch stem, after it
sums of spikes up to 2 + 2 * depth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megasnn.config.checks import Positive, Size
from megasnn.models.model import Model

if TYPE_CHECKING:
    from megasnn.layers.layer import Layer

STEM_STAGES = 4


@dataclass(frozen=True, kw_only=True)
class Spikformer(Model):
    """Spikformer's dimensions (arXiv 2209.15425), by default SpikingJelly 2.0.0's spikformer_cifar10."""

    name = "spikformer"
    marker = "patch_embed.stages.3.conv.weight"

    embed_dim: Size = 384
    """Channels of the blocks. The four stages of the patch stem have 1/8, 1/4, 1/2 and all of them."""
    depth: Size = 4
    """Number of blocks, each with an attention and an MLP."""
    num_heads: Size = 12
    """Attention heads, divided among the tensor-parallel ranks."""
    mlp_ratio: Positive = 4.0
    """Hidden channels of the MLP, in multiples of --embed-dim."""
    patch_size: Literal[4, 16] = 4
    """Pixels per token and side: the stem pools twice (4) or four times (16)."""
    event_frames: bool = False
    """Samples are recordings of event cameras, not images."""

    def problems(self, tensor_parallel: int) -> list[str]:
        wrong = super().problems(tensor_parallel)
        if self.embed_dim % 2 ** (STEM_STAGES - 1):
            wrong.append(f"--embed-dim {self.embed_dim} must be a multiple of 8, for the first stage of the stem")
        if self.embed_dim % self.num_heads:
            wrong.append(f"--embed-dim {self.embed_dim} must be a multiple of --num-heads {self.num_heads}")
        if self.image_size % self.patch_size:
            wrong.append(f"--image-size {self.image_size} must be a multiple of --patch-size {self.patch_size}")
        return wrong

    def layers(self) -> Iterable[Layer]:
        from megasnn.layers import ConvNormNeuron, MeanLinear, ResidualMLP
        from megasnn.layers.init import trunc_normal, zeros
        from megasnn.layers.layer import layer
        from megasnn.models.spikformer.blocks import PositionalEncoding, ResidualAttention

        dim = self.embed_dim
        stem = "patch_embed"
        # A stage with a pooling halves the sides: the last two stages give tokens of 4 pixels, all four of 16.
        first_pool = 2 if self.patch_size == 4 else 0
        inputs = self.in_channels
        for stage in range(STEM_STAGES):
            outputs = dim // 2 ** (STEM_STAGES - 1 - stage)
            pools = stage >= first_pool
            conv_norm_neuron = ConvNormNeuron(inputs, outputs, 3, max_pool=pools, initialise=trunc_normal)
            yield layer(f"{stem}.stages.{stage}", conv_norm_neuron, layer_group=stem)
            inputs = outputs
        positional = PositionalEncoding(dim, dim, kernel_size=3, initialise=trunc_normal)
        yield layer(f"{stem}.positional_encoding", positional, layer_group=stem)
        for block in range(self.depth):
            name = f"blocks.{block}"
            attention = ResidualAttention(dim, self.num_heads, initialise=trunc_normal)
            yield layer(f"{name}.attention", attention, layer_group=name)
            mlp = ResidualMLP(dim, int(dim * self.mlp_ratio), initialise=trunc_normal)
            yield layer(f"{name}.mlp", mlp, layer_group=name)
        yield layer("head", MeanLinear(dim, self.num_classes, initialise=trunc_normal, initialise_bias=zeros))
