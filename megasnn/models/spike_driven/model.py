"""Spike-driven Transformer (arXiv 2307.01694) as in SpikingJelly 2.0.0's `spike_driven_transformer`.

Shortcuts join potentials, not spikes: blocks exchange real numbers, and every convolution in a block follows a neuron.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megasnn.config.checks import Positive, Size
from megasnn.models.model import Model

if TYPE_CHECKING:
    from megasnn.layers.layer import Layer

STEM_STAGES = 4


@dataclass(frozen=True, kw_only=True)
class SpikeDrivenTransformer(Model):
    """The Spike-driven Transformer's dimensions (arXiv 2307.01694), by default SpikingJelly's sdt_8_384."""

    name = "spike_driven"
    marker = "patch_embed.positional_encoding.inner.conv.weight"

    embed_dim: Size = 384
    """Channels of the blocks. The four stages of the patch stem have 1/8, 1/4, 1/2 and all of them."""
    depth: Size = 8
    """Number of blocks, each with an attention and an MLP."""
    mlp_ratio: Positive = 4.0
    """Hidden channels of the MLP, in multiples of --embed-dim."""
    pooled_stages: str = "1111"
    """A digit for each of the four stages of the patch stem: 1 halves height and width, 0 keeps them."""
    image_size: Size = 224
    num_classes: Size = 1000

    def problems(self, tensor_parallel: int) -> list[str]:
        wrong = super().problems(tensor_parallel)
        if len(self.pooled_stages) != STEM_STAGES or set(self.pooled_stages) - set("01"):
            wrong.append(f'--pooled-stages "{self.pooled_stages}" must be four digits, each 0 or 1')
        if self.embed_dim % 2 ** (STEM_STAGES - 1):
            wrong.append(f"--embed-dim {self.embed_dim} must be a multiple of 8, for the first stage of the stem")
        return wrong

    def layers(self) -> Iterable[Layer]:
        from megasnn.layers import ConvNormNeuron, MaxPool, NeuronConvNorm, Residual, SpikeDrivenAttention
        from megasnn.layers.layer import layer
        from megasnn.models.spike_driven.blocks import MLP, Head, Potential

        dim = self.embed_dim
        stem = "patch_embed"
        channels = [self.in_channels, *(dim // 2 ** (STEM_STAGES - 1 - stage) for stage in range(STEM_STAGES))]
        # The last stage is another layer: it ends in potentials.
        *first, last = (pooled == "1" for pooled in self.pooled_stages)
        for stage, pools in enumerate(first):
            conv_norm_neuron = ConvNormNeuron(channels[stage], channels[stage + 1], 3, bias=True)
            yield layer(f"{stem}.stages.{stage}", conv_norm_neuron, layer_group=stem)
            if pools:
                yield layer(f"{stem}.pools.{stage}", MaxPool(), layer_group=stem)
        yield layer(f"{stem}.last", Potential(channels[-2], dim, last), layer_group=stem)
        yield layer(f"{stem}.positional_encoding", Residual(NeuronConvNorm(dim, dim, 3)), layer_group=stem)
        for block in range(self.depth):
            name = f"blocks.{block}"
            yield layer(f"{name}.attention", Residual(SpikeDrivenAttention(dim)), layer_group=name)
            yield layer(f"{name}.mlp", MLP(dim, int(dim * self.mlp_ratio)), layer_group=name)
        yield layer("head", Head(dim, self.num_classes))
