"""Blocks of E-SpikeFormer, which exchange potentials.

Neurons fire up to D spikes in a step. The layer after them divides the count by D.
"""

from __future__ import annotations

import math
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from megasnn.layers import MeanLinear, ParallelBatchNorm, ParallelConv, ParallelLinear
from megasnn.layers.attention import heads_per_rank, sums_type
from megasnn.layers.context import context_for
from megasnn.layers.init import trunc_normal, zeros
from megasnn.layers.neuron import make_neuron
from megasnn.layers.row_context import sum_for_each
from megasnn.parallel.collectives import from_matrix, to_matrix

EXPANSION = 2
"""Channels inside a separable convolution, in multiples of those outside."""
VALUE_RATIO = 4
"""Channels of v, in multiples of those of q and k."""


class ConvNorm(nn.Module):
    """Convolution and norm of images, or counts divided by `largest`. `conv_options` as in ParallelConv."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int = 1, largest: int = 1, **conv_options: Any) -> None:
        super().__init__()
        self.largest = largest
        self.conv = ParallelConv(inputs, outputs, kernel_size, padding=kernel_size // 2, **conv_options)
        self.norm = ParallelBatchNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x, add_bias=False)
        # Dividing after the sums lets counts travel as whole numbers. The bits are those of a division before the sums
        # if the largest count is a power of two.
        if self.largest != 1:
            y = y / self.largest
        if self.conv.bias is not None:
            y = y + self.conv.bias.to(y.dtype).view(-1, 1, 1)
        return self.norm(y)


class CountConvNorm(ConvNorm):
    """Neurons, convolution and norm: potentials -> potentials."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int = 1, **conv_options: Any) -> None:
        neuron = make_neuron()
        super().__init__(inputs, outputs, kernel_size, neuron.largest or 1, **conv_options)
        self.neuron = neuron

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.neuron(x))


class SeparableConv(nn.Module):
    """x + project(depthwise(expand(x))), pointwise but for the depthwise convolution."""

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__()
        hidden = EXPANSION * dim
        self.expand = CountConvNorm(dim, hidden)
        self.depthwise = CountConvNorm(hidden, hidden, kernel_size, groups=hidden)
        self.project = CountConvNorm(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.depthwise(self.expand(x)))


class MLP(nn.Module):
    """x + fc2(fc1(x)), with global numbers of channels."""

    def __init__(self, dim: int, hidden: int, **conv_options: Any) -> None:
        super().__init__()
        self.fc1 = CountConvNorm(dim, hidden, **conv_options)
        self.fc2 = CountConvNorm(hidden, dim, **conv_options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x))


class CountAttention(nn.Module):
    """x + attention(x), E-SDSA: out = q (k^T v) * 2 / sqrt(d) by head over tokens, without softmax.

    A rank computes whole heads. Backward stores q, k, v in the compute type.

    Args:
        dim: C, global.
    Raises:
        ValueError: see `heads_per_rank`.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        context = context_for(None)
        self.local_heads = heads_per_rank(dim, num_heads, context.tp.size)
        self.neuron = make_neuron()
        largest = self.neuron.largest or 1
        wide = VALUE_RATIO * dim
        self.q = ConvNorm(dim, dim, largest=largest)
        self.k = ConvNorm(dim, dim, largest=largest)
        self.v = ConvNorm(dim, wide, largest=largest)
        self.q_neuron = make_neuron()
        self.k_neuron = make_neuron()
        self.v_neuron = make_neuron()
        self.projection = CountConvNorm(wide, dim)
        # q, k and v are counts, each to be divided by the largest.
        self.scale = 2 / math.sqrt(dim // num_heads) / largest**3
        self._row_group = context.row_group

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.neuron(x)
        wide = self.v_neuron(self.v(spikes))
        q, k, v = (
            rearrange(to_matrix(each), "(f l) (h d) -> f h l d", f=wide.shape[:2].numel(), h=self.local_heads)
            for each in (self.q_neuron(self.q(spikes)), self.k_neuron(self.k(spikes)), wide)
        )
        # Products of counts are exact in float32 in any order. k^T v first costs L d^2 in place of L^2 d.
        exact = sums_type(x.dtype)
        kv = k.to(exact).transpose(-2, -1) @ v.to(exact)
        if self._row_group is not None and not x.is_meta:
            kv = sum_for_each(kv, self._row_group)
        out = rearrange((q.to(exact) @ kv) * self.scale, "f h l d -> (f l) (h d)").to(x.dtype)
        return x + self.projection(from_matrix(out, wide.shape))


class Head(MeanLinear):
    """Mean over tokens, neurons, and a linear layer on counts: potentials -> logits `[T, N, classes]`."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__(dim, num_classes, initialise=trunc_normal, initialise_bias=zeros)
        self.neuron = make_neuron()

    def forward(self, x: Tensor) -> Tensor:
        return ParallelLinear.forward(self, self.neuron(self.mean(x)))
