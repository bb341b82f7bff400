"""Blocks of E-SpikeFormer, between which potentials go. Neurons fire up to D spikes in a step, and what takes them
divides their number by D."""

from __future__ import annotations

import math
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from megasnn.layers import MeanLinear, ParallelBatchNorm, ParallelConv, ParallelLinear
from megasnn.layers.attention import own_heads, sums_type
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
    """Convolution and norm of images, or of counts, which are divided by the largest.

    The division comes behind the sums: so counts travel and are kept as whole numbers, and where the largest is a power
    of two the bits are those of a division in front.

    Args:
        largest: of the counts. conv_options: as of ParallelConv.
    """

    def __init__(self, inputs: int, outputs: int, kernel_size: int = 1, largest: int = 1, **conv_options: Any) -> None:
        super().__init__()
        self.largest = largest
        self.conv = ParallelConv(inputs, outputs, kernel_size, padding=kernel_size // 2, **conv_options)
        self.norm = ParallelBatchNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y, bias = self.conv(x, add_bias=False), self.conv.bias
        y = y if self.largest == 1 else y / self.largest
        return self.norm(y if bias is None else y + bias.to(y.dtype).view(-1, 1, 1))


class CountConvNorm(ConvNorm):
    """Neurons, convolution and norm: potentials -> potentials. Args: as of ConvNorm, but for the largest count."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int = 1, **conv_options: Any) -> None:
        neuron = make_neuron()
        super().__init__(inputs, outputs, kernel_size, neuron.largest or 1, **conv_options)
        self.neuron = neuron

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.neuron(x))


class SeparableConv(nn.Module):
    """x + project(depthwise(expand(x))): only the depthwise convolution has a kernel wider than a pixel."""

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__()
        hidden = EXPANSION * dim
        self.expand = CountConvNorm(dim, hidden)
        self.depthwise = CountConvNorm(hidden, hidden, kernel_size, groups=hidden)
        self.project = CountConvNorm(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.depthwise(self.expand(x)))


class MLP(nn.Module):
    """x + fc2(fc1(x)). Args: dim, hidden: the global numbers of channels. conv_options: as of CountConvNorm."""

    def __init__(self, dim: int, hidden: int, **conv_options: Any) -> None:
        super().__init__()
        self.fc1, self.fc2 = CountConvNorm(dim, hidden, **conv_options), CountConvNorm(hidden, dim, **conv_options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x))


class CountAttention(nn.Module):
    """x + attention(x), E-SDSA: without softmax, out = q (k^T v) * 2 / sqrt(d) for each head, over the tokens, where v
    has four times the channels of q and k.

    A rank computes whole heads. Counts are multiplied as they are, exact in float32 in any order, and k^T v first costs
    L d^2 in place of L^2 d. q, k and v are kept for backward in the type that is computed in.

    Args:
        dim: C, the global number of channels.
    Raises:
        ValueError: as `own_heads`.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        context = context_for(None)
        self.local_heads = own_heads(dim, num_heads, context.tp.size)
        self.neuron = make_neuron()
        largest, wide = self.neuron.largest or 1, VALUE_RATIO * dim
        self.q, self.k, self.v = (ConvNorm(dim, outputs, largest=largest) for outputs in (dim, dim, wide))
        self.q_neuron, self.k_neuron, self.v_neuron = (make_neuron() for _ in range(3))
        self.projection = CountConvNorm(wide, dim)
        self.scale = 2 / math.sqrt(dim // num_heads) / largest**3
        self._rows = context.row_group

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.neuron(x)
        wide = self.v_neuron(self.v(spikes))
        q, k, v = (
            rearrange(to_matrix(each), "(f l) (h d) -> f h l d", f=wide.shape[:2].numel(), h=self.local_heads)
            for each in (self.q_neuron(self.q(spikes)), self.k_neuron(self.k(spikes)), wide)
        )
        exact = sums_type(x.dtype)
        kv = k.to(exact).transpose(-2, -1) @ v.to(exact)
        if self._rows is not None and not x.is_meta:
            kv = sum_for_each(kv, self._rows)
        out = rearrange((q.to(exact) @ kv) * self.scale, "f h l d -> (f l) (h d)").to(x.dtype)
        return x + self.projection(from_matrix(out, wide.shape))


class Head(MeanLinear):
    """Mean over the tokens, neurons, and a linear layer on their counts: potentials -> logits `[T, N, classes]`."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__(dim, num_classes, initialise=trunc_normal, initialise_bias=zeros)
        self.neuron = make_neuron()

    def forward(self, x: Tensor) -> Tensor:
        return ParallelLinear.forward(self, self.neuron(self.mean(x)))
