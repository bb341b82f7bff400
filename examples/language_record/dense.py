"""A dense language model, to compare a spiking one with: SpikeLM's decoder without neurons, one time step.

    python examples/language_record/dense.py --data-path TEXTS --train-iters 1000

Dimensions, initial values and names of the weights are those of `python -m megasnn spike_lm`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import megasnn
from megasnn import ArraySpec, CausalAttention, layer
from megasnn.layers.embedding import ParallelEmbedding
from megasnn.layers.layer import Layer
from megasnn.layers.layer_norm import ParallelLayerNorm
from megasnn.layers.vocabulary import NextTokenLoss
from megasnn.models.spike_lm.blocks import token_linear


class AttentionHalf(nn.Module):
    """x + projection(attention(qkv(norm(x)))), on `[1, N, C_local, L]`."""

    mixes_tokens = False

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm = ParallelLayerNorm(dim)
        self.qkv = token_linear(dim, 3 * dim, "column", blocks=3)
        self.attention = CausalAttention(dim, num_heads)
        self.projection = token_linear(dim, dim, "row")

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attention(self.qkv(self.norm(x)))
        out: Tensor = x + self.projection(attended)
        return out


class MLPHalf(nn.Module):
    """x + fc2(gelu(fc1(norm(x)))), on `[1, N, C_local, L]`."""

    mixes_tokens = False

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = ParallelLayerNorm(dim)
        self.fc1 = token_linear(dim, hidden, "column")
        self.fc2 = token_linear(hidden, dim, "row")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm(x))))
        return out


@dataclass(frozen=True, kw_only=True)
class DenseLM(megasnn.Model):
    """Causal decoder with layer norms, rotary positions and a GELU in the MLP."""

    unused = ("image_size", "in_channels", "num_classes")

    time_steps: int = 1
    """Time steps; only 1."""
    embed_dim: int = 256
    """Channels of the stream."""
    depth: int = 6
    """Number of blocks, each with an attention and an MLP."""
    num_heads: int = 8
    """Attention heads."""
    mlp_ratio: float = 4.0
    """Hidden channels of the MLP, in multiples of --embed-dim."""
    seq_length: int = 256
    """Tokens of a sample."""
    vocab_size: int = 257
    """Number of tokens in the vocabulary."""

    @property
    def inputs(self) -> Mapping[str, ArraySpec]:
        return {"tokens": self.target}

    @property
    def target(self) -> ArraySpec:
        return ArraySpec((self.seq_length,), "int", below=self.vocab_size, over_tokens=True)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        loss: Tensor = output["loss"][0]
        return loss

    def metrics(self, output: Any, target: Tensor) -> Mapping[str, Tensor]:
        return {"top1": output["top1"][0]}

    def problems(self, tensor_parallel: int) -> list[str]:
        wrong = super().problems(tensor_parallel)
        if self.time_steps != 1:
            wrong.append(f"--time-steps {self.time_steps}: a dense model has no neurons, so leave it at 1")
        if self.num_heads < 1 or self.embed_dim % self.num_heads:
            wrong.append(f"--embed-dim {self.embed_dim} must be a multiple of --num-heads {self.num_heads}")
        return wrong

    def layers(self) -> Iterable[Layer]:
        dim = self.embed_dim
        yield layer("embedding", ParallelEmbedding(self.vocab_size, dim))
        for block in range(self.depth):
            name = f"blocks.{block}"
            yield layer(f"{name}.attention", AttentionHalf(dim, self.num_heads), layer_group=name)
            yield layer(f"{name}.mlp", MLPHalf(dim, int(dim * self.mlp_ratio)), layer_group=name)
        yield layer("norm", ParallelLayerNorm(dim), layer_group="head")
        yield layer("head", NextTokenLoss(dim, self.vocab_size), takes=("norm", "target"))


if __name__ == "__main__":
    megasnn.pretrain(DenseLM)
