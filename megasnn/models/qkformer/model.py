"""QKFormer (arXiv 2403.16552) as in SpikingJelly 2.0.0's `model.qkformer`: dimensions and layers.

Each of three stages halves height and width and doubles the channels. Attention in the first two masks tokens by q
alone; the last has Spikformer's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megasnn.config.checks import Positive, Size, parse_numbers, refusal
from megasnn.models.model import Model

if TYPE_CHECKING:
    from megasnn.layers.layer import Layer

STAGES = 3


@dataclass(frozen=True, kw_only=True)
class QKFormer(Model):
    """QKFormer's dimensions (arXiv 2403.16552); the defaults are SpikingJelly 2.0.0's qkformer_10_384."""

    name = "qkformer"
    marker = "stage1.0.attention.inner.qk.conv.weight"

    embed_dim: Size = 384
    """Channels of the last stage; the two before it have a quarter and a half."""
    depths: str = "1,2,7"
    """Number of blocks in each of the three stages."""
    num_heads: str = "6,6,6"
    """Attention heads in each stage, divided among the tensor-parallel ranks."""
    mlp_ratio: Positive = 4.0
    """Hidden channels of the MLP, in multiples of the stage's channels."""
    patch_embedding: Literal["imagenet", "cifar"] = "imagenet"
    """How stages begin. imagenet: each halves height and width, the first one twice (SpikingJelly); cifar: the first
    keeps them, the others halve them after their last convolution (the authors' model for 32 x 32 images)."""
    image_size: Size = 224
    num_classes: Size = 1000

    def problems(self, tensor_parallel: int) -> list[str]:
        wrong = super().problems(tensor_parallel)
        wrong += refusal(parse_numbers, "depths", self.depths, STAGES)
        wrong += refusal(parse_numbers, "num_heads", self.num_heads, STAGES)
        if not wrong and self.embed_dim % 8:
            wrong.append(f"--embed-dim {self.embed_dim} must be a multiple of 8, for the first stage's first layer")
        return wrong

    def layers(self) -> Iterable[Layer]:
        from megasnn.layers import MeanLinear, Residual, ResidualMLP, SpikingSelfAttention, TokenAttention
        from megasnn.layers.layer import layer
        from megasnn.models.qkformer.blocks import PatchEmbedding

        inputs = self.in_channels
        small = self.patch_embedding == "cifar"
        depths = parse_numbers("depths", self.depths, STAGES)
        num_heads = parse_numbers("num_heads", self.num_heads, STAGES)
        for number, (depth, heads) in enumerate(zip(depths, num_heads, strict=True), start=1):
            dim = self.embed_dim // 2 ** (STAGES - number)
            yield layer(f"patch_embed{number}", PatchEmbedding(inputs, dim, begins=number == 1, small=small))
            # As published: the early stages have too many tokens for attention between all pairs.
            attention = SpikingSelfAttention if number == STAGES else TokenAttention
            for block in range(depth):
                name = f"stage{number}.{block}"
                yield layer(f"{name}.attention", Residual(attention(dim, heads)), layer_group=name)
                yield layer(f"{name}.mlp", ResidualMLP(dim, int(dim * self.mlp_ratio), bias=True), layer_group=name)
            inputs = dim
        yield layer("head", MeanLinear(inputs, self.num_classes))
