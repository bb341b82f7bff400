"""Spiking self-attention cut by whole heads (Spikformer, arXiv 2209.15425, equation 10; SpikingJelly 2.0.0's form), and
what QKFormer and the Spike-driven Transformer have in its place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from megasnn.kernels import NeuronSpec
from megasnn.kernels.layout import empty, on_gpu
from megasnn.kernels.spike_codec import Content, bits_of, encode, unpack_bits_into
from megasnn.layers.blocks import ConvNormNeuron
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.conv import ParallelConv
from megasnn.layers.neuron import make_neuron
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.row_context import sum_counts, sum_for_each
from megasnn.layers.shape_inference import LARGEST_COUNT
from megasnn.parallel.collectives import from_matrix, start_all_reduce_sum, to_matrix
from megasnn.parallel.sharding import Initialiser
from megasnn.parallel_state import Group


class _HeadAttention(nn.Module):
    """Attention of which a rank computes `num_heads / size` heads, between a unit that gives q, k and perhaps v, cut
    inside each of these blocks, and one that joins the heads.

    Args:
        dim: C, the global number of channels.
        v_threshold: from which the neuron on the attention fires; 0.5 in Spikformer.
        initialise: fills the global weights; by default as torch does.
    """

    fused: str  # name of the first unit; its letters are the blocks

    def __init__(
        self,
        dim: int,
        num_heads: int,
        context: BuildContext | None = None,
        *,
        v_threshold: float = 0.5,
        initialise: Initialiser | None = None,
    ) -> None:
        super().__init__()
        context = context_for(context)
        self.local_heads = own_heads(dim, num_heads, context.tp.size)
        _require_spikes(self, context.neuron)
        conv_norm_neuron = partial(ConvNormNeuron, context=context, dims=1, initialise=initialise)
        blocks = len(self.fused)
        self.add_module(self.fused, conv_norm_neuron(dim, blocks * dim, blocks=blocks))
        self.projection = conv_norm_neuron(dim, dim)
        self.neuron = make_neuron(replace(context.neuron, v_threshold=v_threshold), context)
        self._rows, self._tokens, self._traceable = context.row_group, 0, context.numerics.traceable


class SpikingSelfAttention(_HeadAttention):
    """`[T, N, C_local, H, W]` spikes or counts -> `[T, N, C_local, H, W]` spikes.

    Softmax-free: out = (v k^T) q * 0.125 for each head, over the tokens. With 0/1 entries every sum is a whole number,
    so the product is exact in float32 in any order, and computing k v^T first costs L d^2 in place of L^2 d.
    """

    fused = "qkv"
    qkv: ConvNormNeuron

    def forward(self, x: Tensor) -> Tensor:
        qkv, tokens = self.qkv(x), x.shape[3:].numel()
        if x.is_meta:
            self._tokens = tokens  # of whole images
        frames, group = qkv.shape[0] * qkv.shape[1], None if x.is_meta else self._rows  # numel() would fix an export's
        options = AttendOptions(self.local_heads, frames, tokens if group is None else self._tokens, group)
        if self._traceable:
            out = attend(to_matrix(qkv), options)
        else:
            out = Attend.apply(to_matrix(qkv), bits_of(qkv), options)
        return self.projection(self.neuron(from_matrix(out, qkv.shape)))


class TokenAttention(_HeadAttention):
    """Attention by q and k alone (QKFormer, arXiv 2403.16552, equations 6 to 8): `[T, N, C_local, H, W]` spikes or
    counts -> spikes. Of each head and token, a neuron fires on the sum of q, and lets k through where it does."""

    fused = "qk"
    qk: ConvNormNeuron

    def forward(self, x: Tensor) -> Tensor:
        qk = self.qk(x)
        q, k = qk.unflatten(2, (2, self.local_heads, -1)).unbind(2)  # each [T, N, heads, d, H, W], cut by itself
        mask = self.neuron(q.sum(3, keepdim=True, dtype=sums_type(q.dtype)).to(q.dtype))
        return self.projection((mask * k).flatten(2, 3))


class SpikeDrivenAttention(nn.Module):
    """Attention without a product of matrices (Spike-driven Transformer, arXiv 2307.01694, equations 9 to 11):
    `[T, N, C_local, H, W]` potentials -> the same. A neuron of each channel fires on the number of tokens in which k
    and v fire together, and lets q through where it does. Every channel is by itself, and heads make no difference.

    Args:
        dim: C, the global number of channels.
    """

    def __init__(self, dim: int, context: BuildContext | None = None) -> None:
        super().__init__()
        context = context_for(context)
        _require_spikes(self, context.neuron)
        self.neuron = make_neuron(context.neuron, context)
        self.q, self.k, self.v = (ConvNormNeuron(dim, dim, context=context) for _ in range(3))
        self.gate = make_neuron(replace(context.neuron, v_threshold=0.5), context)  # on the sums
        self.projection = ParallelConv(dim, dim, 1, context, bias=True)
        self.norm = ParallelBatchNorm(dim, context)
        self._rows = context.row_group

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.neuron(x)
        together = self.k(spikes) * self.v(spikes)
        number = together.flatten(3).sum(-1, dtype=sums_type(together.dtype))
        if self._rows is not None and not x.is_meta:
            number = sum_for_each(number, self._rows)
        gate = self.gate(number.to(together.dtype))
        return self.norm(self.projection(self.q(spikes) * gate.view(*gate.shape, 1, 1)))


def own_heads(dim: int, num_heads: int, ranks: int) -> int:
    """The heads that each tensor parallel rank computes. Raises ValueError where they are no whole number."""
    if dim % num_heads:
        raise ValueError(f"{dim} channels do not divide by --num-heads {num_heads}")
    if num_heads % ranks:
        raise ValueError(f"--num-heads {num_heads} does not divide by --tensor-model-parallel-size {ranks}")
    return num_heads // ranks


def _require_spikes(attention: nn.Module, neuron: NeuronSpec) -> None:
    """Raises ValueError for neurons that give counts."""
    if neuron.largest > 1:
        raise ValueError(
            f"--neuron {neuron.kind} fires up to {neuron.largest} in a step, and {type(attention).__name__} takes "
            "spikes; choose a neuron that fires 0 or 1"
        )


def sums_type(dtype: torch.dtype) -> torch.dtype:
    """The type that holds sums of spikes, which can be larger than what bfloat16 holds exactly."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


# --- the product of q, k and v


SCALE = 0.125  # a power of two: on k^T v, which is small, it gives the same bits as on the output

EXACT_BFLOAT16 = 256  # up to here bfloat16 holds every whole number


@dataclass(frozen=True)
class AttendOptions:
    """Sizes of an attention.

    Attributes:
        heads: of this rank. frames: time steps times samples.
        tokens: number that k^T v is a sum over.
        group: the ranks that share out the tokens: k^T v is summed over the ranks, and so is its gradient.
    """

    heads: int
    frames: int
    tokens: int
    group: Group | None = None

    def split(self, packed: Tensor, rows: torch.Size, dtype: torch.dtype) -> Tensor:
        """q, k and v, `[3, frames, heads, L, d]`, from the bits of rows `[frames * L, 3 * heads * d]`."""
        pattern, sizes = "(f l part h d) -> (part f h l d)", {"f": self.frames, "part": 3, "h": self.heads}
        tokens, d = rows[0] // self.frames, rows[1] // (3 * self.heads)
        if d % 8 == 0:  # each head's bits fill bytes: these are brought in order, before they are unpacked
            packed = rearrange(packed, pattern, l=tokens, **sizes)
        spikes = empty((1, rows.numel()), dtype, packed.device)
        unpack_bits_into(packed, spikes)
        if d % 8:
            spikes = rearrange(spikes[0], pattern, l=tokens, **sizes)
        return spikes.view(3, self.frames, self.heads, tokens, d)


def attend(rows: Tensor, options: AttendOptions) -> Tensor:
    """`Attend` without its gradient, of one rank: nothing is packed."""
    q, k, v = rearrange(rows, "(f l) (part h d) -> part f h l d", f=options.frames, part=3, h=options.heads)
    return rearrange(q @ (k.transpose(-2, -1) @ v * SCALE), "f h l d -> (f l) (h d)")


class Attend(torch.autograd.Function):
    """Rows of q, k, v spikes `[frames * L, 3 * heads * d]` -> rows `[frames * L, heads * d]`; keeps a bit a spike.

    `bits`: the rows, where they are packed already.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bits: Tensor | None, options: AttendOptions) -> Tensor:
        ctx.options, ctx.shape, ctx.dtype = options, rows.shape, rows.dtype
        # The unit before it has a neuron of ours: these are spikes, and nobody has to look.
        packed = encode(rows.reshape(-1), Content.SPIKES) if bits is None else bits
        q, k, v = options.split(packed, rows.shape, exact_type(rows, options.tokens))
        kv, sums = k.transpose(-2, -1) @ v, None
        if options.group is not None:
            kv = sum_counts(kv, options.tokens, options.group)
            sums = kv.to(torch.uint8) if options.tokens <= LARGEST_COUNT else kv
        ctx.save_for_backward(packed, sums)
        return rearrange(product(q, kv * SCALE, rows.dtype), "f h l d -> (f l) (h d)").to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Gradients are formed in float32 at least, on a GPU in bfloat16 where `grad` is that already."""
        packed, sums = ctx.saved_tensors
        options: AttendOptions = ctx.options
        exact = exact_type(grad, options.tokens)
        dtype = exact if grad.dtype == exact else sums_type(grad.dtype)
        spikes = options.split(packed, ctx.shape, exact)
        kv = (spikes[1].transpose(-2, -1) @ spikes[2] if sums is None else sums).to(dtype) * SCALE
        q, k, v = spikes.to(dtype)
        grad = rearrange(grad.to(dtype), "(f l) (h d) -> f h l d", f=options.frames, h=options.heads).contiguous()
        of_kv = (q.transpose(-2, -1) @ grad).mul_(SCALE)
        finish = None if options.group is None else start_all_reduce_sum(of_kv, options.group)
        of_part, of_rows = empty(q.shape, dtype, grad.device), empty(ctx.shape, ctx.dtype, grad.device)
        of_q, of_k, of_v = of_rows.view(options.frames, -1, 3, options.heads, q.shape[-1]).transpose(1, 3).unbind(2)
        of_q.copy_(torch.matmul(grad, kv.transpose(-2, -1), out=of_part))
        if finish is not None:
            finish()
        of_k.copy_(torch.matmul(v, of_kv.transpose(-2, -1), out=of_part))
        of_v.copy_(torch.matmul(k, of_kv, out=of_part))
        return of_rows, None, None


def exact_type(values: Tensor, tokens: int) -> torch.dtype:
    """The type in which k^T v, whose sums are over the tokens, is exact and fastest.

    Tensor cores add the products of bfloat16 in float32. On a CPU float32 is as fast.
    """
    on_tensor_cores = on_gpu(values) and values.dtype in (torch.float32, torch.bfloat16) and tokens <= EXACT_BFLOAT16
    return torch.bfloat16 if on_tensor_cores else sums_type(values.dtype)


def product(q: Tensor, kv: Tensor, dtype: torch.dtype) -> Tensor:
    """q kv, whose sums bfloat16 may not hold: of bfloat16 rounded once, to `dtype`."""
    if q.dtype == dtype or q.dtype != torch.bfloat16:
        return q @ kv
    return torch.bmm(q.flatten(0, 1), kv.flatten(0, 1), out_dtype=dtype).unflatten(0, q.shape[:2])
