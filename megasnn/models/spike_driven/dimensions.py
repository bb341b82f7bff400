"""Dimensions of the Spike-driven Transformer (arXiv 2307.01694)."""

from __future__ import annotations

from dataclasses import dataclass

from megasnn.config.checks import above, at_least
from megasnn.models.model import Model, layers_beside

STEM_STAGES = 4


@dataclass(frozen=True, kw_only=True)
class SpikeDrivenTransformer(Model):
    """Dimensions of the Spike-driven Transformer (arXiv 2307.01694); the defaults are SpikingJelly's sdt_8_384."""

    name = "spike_driven"
    marker = "patch_embed.positional_encoding.inner.conv.weight"
    layers = layers_beside(__name__)

    embed_dim: int = 384
    """Channels of the blocks; the stages of the patch stem have 1/8, 1/4, 1/2 and all of them."""
    depth: int = 8
    """Number of blocks, each an attention and an MLP."""
    mlp_ratio: float = 4.0
    """Hidden channels of the MLP, in multiples of --embed-dim."""
    pooled_stages: str = "1111"
    """Which of the four stages of the patch stem halve height and width, a 1 or a 0 for each."""
    image_size: int = 224
    """Height and width of the images."""
    num_classes: int = 1000
    """Number of classes."""

    def problems(self, tensor_parallel: int) -> list[str]:
        wrong = super().problems(tensor_parallel)
        wrong += at_least(self, 1, "embed_dim", "depth") + above(self, 0, "mlp_ratio")
        if len(self.pooled_stages) != STEM_STAGES or set(self.pooled_stages) - set("01"):
            wrong.append(f'--pooled-stages "{self.pooled_stages}" must be four digits, each 0 or 1')
        if self.embed_dim % 2 ** (STEM_STAGES - 1):
            wrong.append(f"--embed-dim {self.embed_dim} must be a multiple of 8, for the first stage of the stem")
        return wrong
