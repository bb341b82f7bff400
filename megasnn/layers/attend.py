"""Attention without softmax over whole heads: its forward and backward, and what is kept between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from megasnn.kernels.numba.attention import SpikingHeads, spiking_heads
from megasnn.kernels.spike_codec import Content, encode
from megasnn.kernels.tensor_cores import on_gpu
from megasnn.parallel.alike import count_type, sum_counts
from megasnn.parallel.collectives import join_columns, start_all_reduce_sum
from megasnn.parallel_state import Group

SCALE = 0.125
EXACT_BFLOAT16 = 256
"""Up to here bfloat16 holds every whole number."""


@dataclass(frozen=True)
class AttendPlan:
    """
    Attributes:
        frames: time steps times samples.
        heads: of this rank.
        sparse: whether products are sums over spikes, where there are loops for it.
        shared: the ranks that share out the tokens, and the number of all of them: k^T v is summed over the ranks, and
            so is its gradient.
    """

    frames: int
    heads: int
    sparse: bool = False
    shared: tuple[Group, int] | None = None


class Attend(torch.autograd.Function):
    """Rows of q, k, v spikes `[frames * L, 3 * heads * d]` -> rows `[frames * L, heads * d]`; keeps a bit a spike.

    `bits`: the rows, where they are packed already.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bits: Tensor | None, plan: AttendPlan) -> Tensor:
        ctx.plan, ctx.shape, ctx.dtype = plan, rows.shape, rows.dtype
        # The unit before it has a neuron of ours: these are spikes, and nobody has to look.
        packed = encode(rows.reshape(-1), Content.SPIKES) if bits is None else bits
        exact = exact_type(rows, _tokens(rows.shape, plan))
        heads = _spiking(packed, rows.shape, rows.dtype, plan) or DenseHeads(rows.to(exact), plan, rows.dtype)
        kv, shared = heads.counts(), plan.shared
        if shared is not None:
            kv = sum_counts(kv, shared[1], shared[0])
        ctx.save_for_backward(packed, *([] if shared is None else [kv.to(count_type(shared[1]))]))
        return heads.output(kv)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        packed, *sums = ctx.saved_tensors
        plan: AttendPlan = ctx.plan
        heads = _spiking(packed, ctx.shape, grad.dtype, plan) or _dense(packed, ctx.shape, grad, plan)
        kv, grad = sums[0].to(heads.dtype) if sums else heads.counts().to(heads.dtype), heads.prepared(grad)
        of_kv = heads.gradient_of_counts(grad)
        finish = None if plan.shared is None else start_all_reduce_sum(of_kv, plan.shared[0], "backward")
        with_q = heads.gradient_of_q(grad, kv)
        if finish is not None:
            finish()
        return heads.gradients(with_q, of_kv).to(ctx.dtype), None, None


class DenseHeads:
    """q, k and v of some heads as dense tensors, with the same methods as `SpikingHeads`.

    Args:
        rows: `[frames * L, 3 * heads * d]`, in the type that k^T v is formed in.
        dtype: of the output, or of what gradients are formed in.
    """

    def __init__(self, rows: Tensor, plan: AttendPlan, dtype: torch.dtype) -> None:
        # Each [frames, heads, L, d]: copied here once, and not by each product.
        pattern = "(f l) (part h d) -> part f h l d"
        self._split = rearrange(rows, pattern, f=plan.frames, part=3, h=plan.heads).contiguous()
        self._plan, self.dtype = plan, dtype

    def counts(self) -> Tensor:
        _, k, v = self._split
        return k.transpose(-2, -1) @ v

    def output(self, kv: Tensor) -> Tensor:
        out = product(self._split[0], kv, self.dtype).mul_(SCALE)
        return rearrange(out, "f h l d -> (f l) (h d)").to(self.dtype)

    def prepared(self, grad: Tensor) -> Tensor:
        grad, pattern = grad.to(self.dtype), "(f l) (h d) -> f h l d"
        return rearrange(grad, pattern, f=self._plan.frames, h=self._plan.heads).contiguous() * SCALE

    def gradient_of_counts(self, grad: Tensor) -> Tensor:
        return self._split[0].to(self.dtype).transpose(-2, -1) @ grad

    def gradient_of_q(self, grad: Tensor, kv: Tensor) -> Tensor:
        return grad @ kv.transpose(-2, -1)

    def gradients(self, of_q: Tensor, of_kv: Tensor) -> Tensor:
        _, k, v = self._split.to(self.dtype)
        parts = of_q, v @ of_kv.transpose(-2, -1), k @ of_kv
        return rearrange(list(parts), "part f h l d -> (f l) (part h d)")


def _spiking(packed: Tensor, shape: torch.Size, dtype: torch.dtype, plan: AttendPlan) -> SpikingHeads | None:
    return spiking_heads(packed, shape, plan.frames, plan.heads, dtype, SCALE) if plan.sparse else None


def _dense(packed: Tensor, shape: torch.Size, grad: Tensor, plan: AttendPlan) -> DenseHeads:
    """For the gradients. They are formed in float32 at least, on a GPU in bfloat16 where `grad` is that already."""
    exact = exact_type(grad, _tokens(shape, plan))
    rows = join_columns([packed], Content.SPIKES, shape, exact)
    return DenseHeads(rows, plan, exact if grad.dtype == exact else _whole_numbers(grad.dtype))


def _tokens(shape: torch.Size, plan: AttendPlan) -> int:
    return shape[0] // plan.frames if plan.shared is None else plan.shared[1]


def exact_type(values: Tensor, tokens: int) -> torch.dtype:
    """The type in which k^T v, whose sums are over the tokens, is exact and fastest.

    Tensor cores add the products of bfloat16 in float32. On a CPU float32 is as fast.
    """
    on_tensor_cores = on_gpu(values) and values.dtype in (torch.float32, torch.bfloat16) and tokens <= EXACT_BFLOAT16
    return torch.bfloat16 if on_tensor_cores else _whole_numbers(values.dtype)


def product(q: Tensor, kv: Tensor, dtype: torch.dtype) -> Tensor:
    """q kv, whose sums bfloat16 may not hold: of bfloat16 rounded once, to `dtype`."""
    if q.dtype == dtype or q.dtype != torch.bfloat16:
        return q @ kv
    return torch.bmm(q.flatten(0, 1), kv.flatten(0, 1), out_dtype=dtype).unflatten(0, q.shape[:2])


def _whole_numbers(dtype: torch.dtype) -> torch.dtype:
    """The type that holds sums of spikes, which can be larger than what bfloat16 holds exactly."""
    return torch.float32 if dtype == torch.bfloat16 else dtype
