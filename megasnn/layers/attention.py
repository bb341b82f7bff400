"""Spiking self-attention cut by whole heads (Spikformer, arXiv 2209.15425, equation 10; SpikingJelly 2.0.0's form)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megasnn.kernels import NeuronSpec
from megasnn.kernels.spike_codec import bits_of
from megasnn.layers.attend import Attend, AttendPlan
from megasnn.layers.batch_norm import ParallelBatchNorm
from megasnn.layers.channels import untracked
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.conv import ParallelConv
from megasnn.layers.holding import note_exchanges
from megasnn.layers.neuron import ParallelNeuron
from megasnn.layers.rows import rows_of
from megasnn.layers.unit import ConvNormNeuron
from megasnn.parallel.alike import count_type, sum_for_each
from megasnn.parallel.collectives import from_rows, to_rows
from megasnn.parallel.sharding import Initialiser


class SpikingSelfAttention(nn.Module):
    """`[T, N, C_local, H, W]` spikes or counts -> `[T, N, C_local, H, W]` spikes.

    Softmax-free: out = (v k^T) q * 0.125 for each head, over the tokens. With 0/1 entries every sum is a whole number,
    so the product is exact in float32 in any order, and computing k v^T first costs L d^2 in place of L^2 d.

    A rank computes `num_heads / size` heads. The fused q-k-v weight is cut inside each of its three blocks
    (`blocks=3` of its convolution and norm), so that a rank's channels are its heads' q, k and v.

    Args:
        dim: C, the global number of channels.
        v_threshold: from which the neuron behind the attention fires; 0.5 in Spikformer.
        neuron: of the units before and behind it; None for the neuron of the context.
        initialise: fills the global weights; by default as torch does.
    Attributes:
        qkv: unit from C to 3C channels.
        neuron: fires on the attention's result.
        projection: unit from C to C channels.
    Raises:
        ValueError: the heads do not divide by the number of ranks, or the channels by the heads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        context: BuildContext | None = None,
        *,
        v_threshold: float = 0.5,
        neuron: NeuronSpec | None = None,
        initialise: Initialiser | None = None,
    ) -> None:
        super().__init__()
        context = context_for(context)
        self.local_heads = _local_heads(dim, num_heads, context)
        neuron = neuron or context.neuron
        unit = partial(ConvNormNeuron, context=context, pointwise=True, neuron=neuron, initialise=initialise)
        self.qkv, self.projection = unit(dim, 3 * dim, blocks=3), unit(dim, dim)
        self.neuron = ParallelNeuron(replace(neuron, v_threshold=v_threshold), context)
        self._rows, self._tokens, self._sparse = rows_of(context), 0, context.sparse_products

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        if x.is_meta:
            self._tokens = x.shape[3:].numel()  # of whole images
            if self._rows is not None:
                count_type(self._tokens)  # refuses what cannot travel
                note_exchanges(self, backward=1)
        shared = None if self._rows is None or x.is_meta else (self._rows.group, self._tokens)
        plan = AttendPlan(qkv.shape[0] * qkv.shape[1], self.local_heads, self._sparse, shared)
        out = Attend.apply(to_rows(qkv), bits_of(qkv), plan)
        return self.projection(self.neuron(from_rows(out, qkv.shape)))


class TokenAttention(nn.Module):
    """Attention by q and k alone (QKFormer, arXiv 2403.16552, equations 6 to 8): `[T, N, C_local, H, W]` spikes or
    counts -> spikes. Of each head and token, a neuron fires on the sum of q, and lets k through where it does.

    A rank computes `num_heads / size` heads, as in SpikingSelfAttention.

    Args and raises as SpikingSelfAttention.
    Attributes:
        qk: unit from C to 2C channels.
        neuron: fires on the sum of q.
        projection: unit from C to C channels.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        context: BuildContext | None = None,
        *,
        v_threshold: float = 0.5,
        neuron: NeuronSpec | None = None,
        initialise: Initialiser | None = None,
    ) -> None:
        super().__init__()
        context = context_for(context)
        self.local_heads = _local_heads(dim, num_heads, context)
        neuron = neuron or context.neuron
        unit = partial(ConvNormNeuron, context=context, pointwise=True, neuron=neuron, initialise=initialise)
        self.qk, self.projection = unit(dim, 2 * dim, blocks=2), unit(dim, dim)
        self.neuron = ParallelNeuron(replace(neuron, v_threshold=v_threshold), context)

    def forward(self, x: Tensor) -> Tensor:
        qk = self.qk(x)
        with untracked():  # each half is cut by itself
            q, k = qk.unflatten(2, (2, self.local_heads, -1)).unbind(2)  # each [T, N, heads, d, H, W]
        mask = self.neuron(_exact(q).sum(3, keepdim=True).to(q.dtype))
        return self.projection((mask * k).flatten(2, 3))


class SpikeDrivenAttention(nn.Module):
    """Attention without a product of matrices (Spike-driven Transformer, arXiv 2307.01694, equations 9 to 11):
    `[T, N, C_local, H, W]` potentials -> the same. A neuron of each channel fires on the number of tokens in which k
    and v fire together, and lets q through where it does. Every channel is by itself, and heads make no difference.

    Args:
        dim: C, the global number of channels.
        v_threshold: from which the neuron on the sums fires.
        neuron: of all others; None for the neuron of the context.
        initialise: fills the global weights; by default as torch does.
    """

    def __init__(
        self,
        dim: int,
        context: BuildContext | None = None,
        *,
        v_threshold: float = 0.5,
        neuron: NeuronSpec | None = None,
        initialise: Initialiser | None = None,
    ) -> None:
        super().__init__()
        context = context_for(context)
        neuron = neuron or context.neuron
        self.neuron = ParallelNeuron(neuron, context)
        self.q, self.k, self.v = (
            ConvNormNeuron(dim, dim, context=context, neuron=neuron, initialise=initialise) for _ in range(3)
        )
        self.gate = ParallelNeuron(replace(neuron, v_threshold=v_threshold), context)
        self.projection = ParallelConv(dim, dim, 1, context, bias=True, initialise=initialise)
        self.norm = ParallelBatchNorm(dim, context)
        self._rows = rows_of(context)

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.neuron(x)
        together = self.k(spikes) * self.v(spikes)
        number = _exact(together).flatten(3).sum(-1)
        if self._rows is not None and x.is_meta:
            note_exchanges(self, 1, 1)
        elif self._rows is not None:
            number = sum_for_each(number, self._rows.group)
        gate = self.gate(number.to(together.dtype))
        return self.norm(self.projection(self.q(spikes) * gate.view(*gate.shape, 1, 1)))


def _local_heads(dim: int, num_heads: int, context: BuildContext) -> int:
    """The heads that a rank computes. Raises ValueError where heads or channels do not divide."""
    if dim % num_heads:
        raise ValueError(f"{dim} channels do not divide by --num-heads {num_heads}")
    if num_heads % context.tensor.size:
        raise ValueError(
            f"--num-heads {num_heads} does not divide by --tensor-model-parallel-size {context.tensor.size}"
        )
    return num_heads // context.tensor.size


def _exact(values: Tensor) -> Tensor:
    """In a type that holds sums of spikes, which can be larger than what bfloat16 holds exactly."""
    return values.float() if values.dtype == torch.bfloat16 else values
