"""Spiking self-attention cut by whole heads (Spikformer, arXiv 2209.15425, equation 10; SpikingJelly 2.0.0's form)."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from megasnn.comm.layout import from_rows, to_rows
from megasnn.layers.context import BuildContext
from megasnn.layers.neuron import ParallelNeuron
from megasnn.layers.unit import ConvNormNeuron

SCALE = 0.125


class SpikingSelfAttention(nn.Module):
    """`[T, N, C_local, H, W]` spikes or counts -> `[T, N, C_local, H, W]` spikes.

    Softmax-free: out = (v k^T) q * 0.125 for each head, over the tokens. With 0/1 entries every sum is a whole number,
    so the product is exact in float32 in any order, and computing k v^T first costs L d^2 in place of L^2 d.

    A rank computes `num_heads / size` heads. The fused q-k-v weight is cut inside each of its three blocks
    (`blocks=3` of its convolution and norm), so that a rank's channels are its heads' q, k and v.

    Args:
        qkv: unit from C to 3C channels.
        neuron: fires on the attention's result (threshold 0.5 in Spikformer).
        projection: unit from C to C channels.

    Raises:
        ValueError: the heads do not divide by the number of ranks, or the channels by the heads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        context: BuildContext,
        *,
        qkv: ConvNormNeuron,
        neuron: ParallelNeuron,
        projection: ConvNormNeuron,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"--embed-dim {dim} does not divide by --num-heads {num_heads}")
        if num_heads % context.tensor.size:
            raise ValueError(
                f"--num-heads {num_heads} does not divide by --tensor-model-parallel-size {context.tensor.size}"
            )
        self.local_heads = num_heads // context.tensor.size
        self.qkv, self.neuron, self.projection = qkv, neuron, projection

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        frames = qkv.shape[0] * qkv.shape[1]
        rows = _exact(to_rows(qkv))
        q, k, v = rearrange(rows, "(f l) (part h d) -> part f h l d", f=frames, part=3, h=self.local_heads)
        out = rearrange(q @ (k.transpose(-2, -1) @ v) * SCALE, "f h l d -> (f l) (h d)").to(x.dtype)
        return self.projection(self.neuron(from_rows(out, qkv.shape)))


def _exact(spikes: Tensor) -> Tensor:
    """bfloat16 holds whole numbers up to 256 only; the attention's sums of spikes can be larger."""
    return spikes.float() if spikes.dtype == torch.bfloat16 else spikes
