"""SpikeLM's blocks: causal attention and MLP, each with a shortcut."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.layers import ParallelConv, SpikingNeuron
from megasnn.layers.attention import own_heads
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.conv import Style
from megasnn.layers.init import trunc_normal, zeros
from megasnn.layers.layer_norm import ParallelLayerNorm
from megasnn.layers.neuron import State


class _BiSpike(SpikingNeuron):
    """Stand-in."""

    def __init__(self, channels: int, context: BuildContext | None = None) -> None:
        super().__init__(channels, context, largest=None)

    def charge(self, x: Tensor, state: State) -> Tensor:
        return state["v"] + x

    def fire(self, h: Tensor, state: State) -> Tensor:
        scaled = h.clamp(-1.0, 1.0)
        return (scaled.round() - scaled).detach() + scaled

    def reset(self, h: Tensor, spikes: Tensor, state: State) -> State:
        return {"v": 0.25 * h * (1.0 - spikes.detach())}


class _Attention(nn.Module):
    """Stand-in."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, qkv: Tensor) -> Tensor:
        if qkv.is_meta:
            return qkv[:, :, : qkv.shape[2] // 3]
        time, samples, channels, length = qkv.shape
        parts = qkv.movedim(2, -1).reshape(time * samples, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(time, samples, length, channels // 3).movedim(-1, 2)


class AttentionHalf(nn.Module):
    """A block's first half: x + attention(neuron(norm(x))), on `[T, N, C_local, L]`.

    Args:
        dim: C, global.
    """

    def __init__(self, dim: int, num_heads: int, context: BuildContext | None = None) -> None:
        super().__init__()
        context = context_for(context)
        local_heads = own_heads(dim, num_heads, context.tp.size)
        self.norm = ParallelLayerNorm(dim, context)
        self.neuron = _BiSpike(dim, context)
        self.qkv = _product(dim, 3 * dim, "column", context, blocks=3)
        self.attention = _Attention(local_heads)
        self.projection = _product(dim, dim, "row", context)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.projection(self.attention(self.qkv(self.neuron(self.norm(x)))))


class MLPHalf(nn.Module):
    """A block's second half: x + fc2(gelu(fc1(neuron(norm(x))))), on `[T, N, C_local, L]`.

    Args:
        dim, hidden: global.
    """

    def __init__(self, dim: int, hidden: int, context: BuildContext | None = None) -> None:
        super().__init__()
        context = context_for(context)
        self.norm = ParallelLayerNorm(dim, context)
        self.neuron = _BiSpike(dim, context)
        self.fc1 = _product(dim, hidden, "column", context)
        self.fc2 = _product(hidden, dim, "row", context)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.neuron(self.norm(x)))))


def _product(inputs: int, outputs: int, style: Style, context: BuildContext, blocks: int = 1) -> ParallelConv:
    """A linear layer for each token."""
    return ParallelConv(
        inputs,
        outputs,
        1,
        context,
        initialise=trunc_normal,
        style=style,
        bias=True,
        dims=1,
        blocks=blocks,
        initialise_bias=zeros,
    )
