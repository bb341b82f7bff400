"""Spiking attention, sharded by heads or channels.

Spikformer (arXiv 2209.15425, equation 10, in the form of SpikingJelly 2.0.0), QKFormer (arXiv 2403.16552) and the
Spike-driven Transformer (arXiv 2307.01694).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from megasnn.common.autograd import Function
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

SCALE = 0.125
"""Factor of the attention. A power of two: on k^T v, which is small, it gives the same bits as on the output."""

EXACT_BFLOAT16 = 256
"""bfloat16 represents every integer up to here."""


class _HeadAttention(nn.Module):
    """A rank computes `num_heads / size` heads.

    Args:
        dim: C, global.
        v_threshold: after the attention; 0.5 in Spikformer.
    """

    fused: str
    """Name of the fused layer. Its letters are the blocks."""

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
        self.local_heads = heads_per_rank(dim, num_heads, context.tp.size)
        _require_spikes(self, context.neuron)
        conv_norm_neuron = partial(ConvNormNeuron, context=context, dims=1, initialise=initialise)
        blocks = len(self.fused)
        # One block each for q, k and perhaps v: each is sharded by head.
        self.add_module(self.fused, conv_norm_neuron(dim, blocks * dim, blocks=blocks))
        self.projection = conv_norm_neuron(dim, dim)
        self.neuron = make_neuron(replace(context.neuron, v_threshold=v_threshold), context)
        self._row_group = context.row_group
        self._tokens = 0  # of whole images
        self._traceable = context.numerics.traceable


class SpikingSelfAttention(_HeadAttention):
    """Spiking self-attention: `[T, N, C_local, H, W]` spikes or counts -> spikes.

    No softmax: out = (v k^T) q * 0.125 for each head, over the L tokens.
    """

    fused = "qkv"
    qkv: ConvNormNeuron

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        tokens = x.shape[3:].numel()
        group = None
        if x.is_meta:
            self._tokens = tokens
        elif self._row_group is not None:
            group = self._row_group
            tokens = self._tokens
        # The product of two sizes: numel() would fix the batch size in an export.
        frames = qkv.shape[0] * qkv.shape[1]
        # All sums are integers, so the product is exact in float32 in any order.
        # k^T v comes first: L d^2 operations in place of L^2 d.
        sizes = SpikingAttendSizes(self.local_heads, frames, tokens, group)
        if self._traceable:
            # `SpikingAttend` in torch functions alone, for one rank.
            order = "(f l) (part h d) -> part f h l d"
            q, k, v = rearrange(to_matrix(qkv), order, f=frames, part=3, h=self.local_heads)
            out = rearrange(q @ (k.transpose(-2, -1) @ v * SCALE), "f h l d -> (f l) (h d)")
        else:
            out = SpikingAttend.apply(to_matrix(qkv), bits_of(qkv), sizes)
        return self.projection(self.neuron(from_matrix(out, qkv.shape)))


class TokenAttention(_HeadAttention):
    """Attention from q and k alone (QKFormer, arXiv 2403.16552, equations 6 to 8).

    `[T, N, C_local, H, W]` spikes or counts -> spikes. In each head and token, a neuron on the sum over q gates k.
    """

    fused = "qk"
    qk: ConvNormNeuron

    def forward(self, x: Tensor) -> Tensor:
        qk = self.qk(x)
        # Each [T, N, heads, d, H, W]: q and k are blocks, sharded separately.
        q, k = qk.unflatten(2, (2, self.local_heads, -1)).unbind(2)
        mask = self.neuron(q.sum(3, keepdim=True, dtype=sums_type(q.dtype)).to(q.dtype))
        return self.projection((mask * k).flatten(2, 3))


class SpikeDrivenAttention(nn.Module):
    """Attention without matrix products (Spike-driven Transformer, arXiv 2307.01694, equations 9 to 11).

    `[T, N, C_local, H, W]` potentials -> the same. For each channel, a neuron on the number of tokens with spikes in
    both k and v gates q. Heads make no difference.

    Args:
        dim: C, global.
    """

    def __init__(self, dim: int, context: BuildContext | None = None) -> None:
        super().__init__()
        context = context_for(context)
        _require_spikes(self, context.neuron)
        self.neuron = make_neuron(context.neuron, context)
        self.q, self.k, self.v = (ConvNormNeuron(dim, dim, context=context) for _ in range(3))
        self.gate = make_neuron(replace(context.neuron, v_threshold=0.5), context)
        self.projection = ParallelConv(dim, dim, 1, context, bias=True)
        self.norm = ParallelBatchNorm(dim, context)
        self._row_group = context.row_group

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.neuron(x)
        together = self.k(spikes) * self.v(spikes)
        number = together.flatten(3).sum(-1, dtype=sums_type(together.dtype))
        if self._row_group is not None and not x.is_meta:
            number = sum_for_each(number, self._row_group)
        gate = self.gate(number.to(together.dtype))
        return self.norm(self.projection(self.q(spikes) * gate.view(*gate.shape, 1, 1)))


def heads_per_rank(dim: int, num_heads: int, ranks: int) -> int:
    """Heads per rank. Raises ValueError if that is no integer."""
    if dim % num_heads:
        raise ValueError(f"{dim} channels do not divide by --num-heads {num_heads}")
    if num_heads % ranks:
        raise ValueError(f"--num-heads {num_heads} does not divide by --tensor-model-parallel-size {ranks}")
    return num_heads // ranks


def _require_spikes(attention: nn.Module, neuron: NeuronSpec) -> None:
    if neuron.largest > 1 or neuron.lowest < 0:
        raise ValueError(
            f"--neuron {neuron.kind} fires from {neuron.lowest} to {neuron.largest} in a step, and "
            f"{type(attention).__name__} takes spikes; choose a neuron that fires 0 or 1"
        )


def sums_type(dtype: torch.dtype) -> torch.dtype:
    """The type for sums of spikes: bfloat16 is exact only up to 256."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


@dataclass(frozen=True)
class SpikingAttendSizes:
    """Sizes in the attention product, and the ranks that divide its tokens.

    Attributes:
        frames: time steps times samples.
        tokens: terms in the sums of k^T v.
        group: ranks that divide the tokens, and sum k^T v; None without.
    """

    heads: int
    frames: int
    tokens: int
    group: Group | None = None

    def split(self, packed: Tensor, rows: torch.Size, dtype: torch.dtype) -> Tensor:
        """q, k and v, `[3, frames, heads, L, d]`, from packed rows `[frames * L, 3 * heads * d]`."""
        tokens = rows[0] // self.frames
        d = rows[1] // (3 * self.heads)
        # Heads of whole bytes are reordered before they are unpacked, which moves fewer bytes.
        has_whole_bytes = d % 8 == 0
        if has_whole_bytes:
            packed = self._part_by_part(packed, tokens)
        spikes = empty((1, rows.numel()), dtype, packed.device)
        unpack_bits_into(packed, spikes)
        if not has_whole_bytes:
            spikes = self._part_by_part(spikes, tokens)
        return spikes.view(3, self.frames, self.heads, tokens, d)

    def _part_by_part(self, rows: Tensor, tokens: int) -> Tensor:
        """Flat, in the order `[3, frames, heads, L, d]`, from rows in the order `[frames, L, 3, heads, d]`."""
        return rows.view(self.frames, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).reshape(-1)


class SpikingAttend(Function):
    """Attention product: spikes of q, k, v `[frames * L, 3 * heads * d]` -> `[frames * L, heads * d]`.

    `bits`: the packed rows, if known.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bits: Tensor | None, sizes: SpikingAttendSizes) -> Tensor:
        ctx.sizes = sizes
        ctx.shape = rows.shape
        ctx.dtype = rows.dtype
        # Unchecked: the layer before ends in a neuron of MegaSNN, which fires 0 or 1.
        packed = encode(rows.reshape(-1), Content.SPIKES) if bits is None else bits
        q, k, v = sizes.split(packed, rows.shape, exact_type(rows, sizes.tokens)).unbind()
        sums = None
        if sizes.group is None:
            kv = scaled_product(k.transpose(-2, -1), v)
        else:
            sums = sum_counts(k.transpose(-2, -1) @ v, sizes.tokens, sizes.group)
            kv = sums * SCALE
            if sizes.tokens <= LARGEST_COUNT:
                # A byte an entry, for backward: a count of tokens fits.
                sums = sums.to(torch.uint8)
        # One bit a spike is stored for backward.
        ctx.save_for_backward(packed, sums)
        heads = product(q, kv, rows.dtype)
        return heads.transpose(1, 2).reshape(rows.shape[0], -1).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Computes in float32 or wider; on a GPU in bfloat16 if `grad` is bfloat16."""
        packed, sums = ctx.saved_tensors
        sizes: SpikingAttendSizes = ctx.sizes
        exact = exact_type(grad, sizes.tokens)
        dtype = exact if grad.dtype == exact else sums_type(grad.dtype)
        spikes = sizes.split(packed, ctx.shape, exact)
        if sums is None:
            kv = scaled_product(spikes[1].transpose(-2, -1), spikes[2]).to(dtype)
        else:
            kv = sums.to(dtype) * SCALE
        q, k, v = spikes.to(dtype).unbind()
        _, frames, heads, tokens, d = spikes.shape
        grad = grad.to(dtype).reshape(frames, tokens, heads, d).transpose(1, 2).contiguous()
        grad_kv = scaled_product(q.transpose(-2, -1), grad)
        finish = None
        if sizes.group is not None:
            finish = start_all_reduce_sum(grad_kv, sizes.group)
        # The gradients of q and v take the memory of q and v. That of q needs no sum over ranks: it is computed while
        # grad_kv is summed.
        torch.matmul(grad, kv.transpose(-2, -1), out=q)
        if finish is not None:
            finish()
        grad_k = torch.matmul(v, grad_kv.transpose(-2, -1))
        torch.matmul(k, grad_kv, out=v)
        grad_rows = torch.stack([each.transpose(1, 2) for each in (q, grad_k, v)], dim=2)
        return grad_rows.view(ctx.shape).to(ctx.dtype), None, None


def exact_type(values: Tensor, tokens: int) -> torch.dtype:
    """The fastest type that represents k^T v exactly."""
    # Tensor cores add products of bfloat16 in float32. On a CPU float32 is as fast.
    on_tensor_cores = on_gpu(values) and values.dtype in (torch.float32, torch.bfloat16) and tokens <= EXACT_BFLOAT16
    return torch.bfloat16 if on_tensor_cores else sums_type(values.dtype)


def scaled_product(a: Tensor, b: Tensor) -> Tensor:
    """SCALE a b for matrices `[F, h, ...]`."""
    ignored = a.new_empty(1, 1, 1)
    # Scaled inside the product, without rounding: SCALE is a power of two.
    scaled = torch.baddbmm(ignored, a.flatten(0, 1), b.flatten(0, 1), beta=0, alpha=SCALE)
    return scaled.view(*a.shape[:2], *scaled.shape[1:])


def product(q: Tensor, kv: Tensor, dtype: torch.dtype) -> Tensor:
    """q kv. bfloat16 inputs give a result in `dtype`, rounded once."""
    if q.dtype == dtype or q.dtype != torch.bfloat16:
        return q @ kv
    # Sums may exceed bfloat16's integers.
    return torch.bmm(q.flatten(0, 1), kv.flatten(0, 1), out_dtype=dtype).view(*q.shape[:3], kv.shape[3])
