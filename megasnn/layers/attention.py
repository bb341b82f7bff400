"""Spiking self-attention cut by whole heads (Spikformer, arXiv 2209.15425, equation 10; SpikingJelly 2.0.0's form)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from megasnn.comm.alike import count_type, sum_counts, sum_for_each
from megasnn.comm.codec import Content, encode
from megasnn.comm.collectives import from_rows, join_columns, start_all_reduce_sum, to_rows
from megasnn.comm.group import Group
from megasnn.kernels import NeuronSpec
from megasnn.kernels.packed import bits_of
from megasnn.kernels.tensor_cores import on_gpu
from megasnn.layers.batch_norm import ParallelBatchNorm
from megasnn.layers.channels import all_channels
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.conv import ParallelConv
from megasnn.layers.holding import note_exchanges
from megasnn.layers.neuron import ParallelNeuron
from megasnn.layers.rows import rows_of
from megasnn.layers.unit import ConvNormNeuron
from megasnn.sharding import Initialiser

SCALE = 0.125
EXACT_BFLOAT16 = 256
"""Up to here bfloat16 holds every whole number."""


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
        self._rows, self._tokens = rows_of(context), 0

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        if x.is_meta:
            self._tokens = x.shape[3:].numel()  # of whole images
            if self._rows is not None:
                count_type(self._tokens)  # refuses what cannot travel
                note_exchanges(self, backward=self._rows.exchanges_of_sum)
        shared = None if self._rows is None or x.is_meta else (self._rows.group, self._tokens)
        out = _Attend.apply(to_rows(qkv), bits_of(qkv), qkv.shape[0] * qkv.shape[1], self.local_heads, shared)
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
        with all_channels():  # each half is cut by itself
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
            note_exchanges(self, self._rows.exchanges_of_sum, self._rows.exchanges_of_sum)
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


class _Attend(torch.autograd.Function):
    """Rows of q, k, v spikes `[frames * L, 3 * heads * d]` -> rows `[frames * L, heads * d]`; keeps a bit a spike.

    `bits`: the rows, where they are packed already. `shared`: the ranks that share out the tokens, and the number of
    all of them: k^T v is summed over the ranks, and so is its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, bits: Tensor | None, frames: int, heads: int, shared: tuple[Group, int] | None
    ) -> Tensor:
        ctx.frames, ctx.heads, ctx.shape, ctx.dtype, ctx.shared = frames, heads, rows.shape, rows.dtype, shared
        exact = _exact_type(rows, rows.shape[0] // frames if shared is None else shared[1])
        q, k, v = _split(rows.to(exact), frames, heads)
        kv = k.transpose(-2, -1) @ v
        if shared is not None:
            kv = sum_counts(kv, shared[1], shared[0])
        # The unit before it has a neuron of ours: these are spikes, and nobody has to look.
        packed = encode(rows.reshape(-1), Content.SPIKES) if bits is None else bits
        ctx.save_for_backward(packed, *([] if shared is None else [kv.to(count_type(shared[1]))]))
        return _join(_product(q, kv, rows.dtype).mul_(SCALE)).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        packed, *sums = ctx.saved_tensors
        exact = _exact_type(grad, ctx.shape[0] // ctx.frames if ctx.shared is None else ctx.shared[1])
        rows = join_columns([packed], Content.SPIKES, ctx.shape, exact)
        q, k, v = _split(rows, ctx.frames, ctx.heads)
        kv = sums[0].to(exact) if sums else k.transpose(-2, -1) @ v
        # A gradient is computed with in float32 at least, on a GPU in bfloat16 where it is that already.
        dtype = exact if grad.dtype == exact else _exact(grad).dtype
        q, k, v, kv = (each.to(dtype) for each in (q, k, v, kv))
        grad_out = rearrange(grad.to(dtype), "(f l) (h d) -> f h l d", f=ctx.frames, h=ctx.heads).contiguous()
        grad_out = grad_out * SCALE
        grad_kv = q.transpose(-2, -1) @ grad_out
        finish = None if ctx.shared is None else start_all_reduce_sum(grad_kv, ctx.shared[0], "backward")
        grad_q = grad_out @ kv.transpose(-2, -1)
        if finish is not None:
            finish()
        parts = grad_q, v @ grad_kv.transpose(-2, -1), k @ grad_kv
        joined = rearrange(list(parts), "part f h l d -> (f l) (part h d)")
        return joined.to(ctx.dtype), None, None, None, None


def _exact_type(values: Tensor, tokens: int) -> torch.dtype:
    """The type in which k^T v, whose sums are over the tokens, is exact and fastest.

    Tensor cores add the products of bfloat16 in float32. On a CPU float32 is as fast.
    """
    on_tensor_cores = on_gpu(values) and values.dtype in (torch.float32, torch.bfloat16) and tokens <= EXACT_BFLOAT16
    return torch.bfloat16 if on_tensor_cores else _exact(values).dtype


def _product(q: Tensor, kv: Tensor, dtype: torch.dtype) -> Tensor:
    """q kv, whose sums bfloat16 may not hold: of bfloat16 rounded once, to `dtype`."""
    if q.dtype == dtype or q.dtype != torch.bfloat16:
        return q @ kv
    return torch.bmm(q.flatten(0, 1), kv.flatten(0, 1), out_dtype=dtype).unflatten(0, q.shape[:2])


def _split(rows: Tensor, frames: int, heads: int) -> Tensor:
    """q, k and v, each `[frames, heads, L, d]`: copied here once, and not by each product."""
    return rearrange(rows, "(f l) (part h d) -> part f h l d", f=frames, part=3, h=heads).contiguous()


def _join(tensor: Tensor) -> Tensor:
    return rearrange(tensor, "f h l d -> (f l) (h d)")


def _exact(values: Tensor) -> Tensor:
    """In a type that holds sums of spikes, which can be larger than what bfloat16 holds exactly."""
    return values.float() if values.dtype == torch.bfloat16 else values
