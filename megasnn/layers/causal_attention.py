"""Causal attention with softmax and rotary positions, sharded by heads.

Context-parallel ranks divide the tokens as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from megasnn.common.autograd import Function
from megasnn.kernels.layout import empty
from megasnn.kernels.numba import rotary
from megasnn.kernels.numba.jit import run_kernel
from megasnn.layers import causal_softmax
from megasnn.layers.attention import heads_per_rank, sums_type
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.token_context import check_own_tokens, divide_tokens, start_to_others
from megasnn.parallel.collectives import from_matrix, start_exchange, to_matrix
from megasnn.parallel_state import Group


class CausalAttention(nn.Module):
    """Causal softmax attention: `[T, N, 3 C_local, L]` -> `[T, N, C_local, L]`, each time step by itself.

    Input channels are the blocks q, k, v, each of this rank's heads. It has no weights. Ranks that divide the tokens
    receive keys and values of earlier tokens, in forward and again in backward, so that a rank stores its own only.

    Args:
        dim: C, global.
        rotary_base: base of the rotary positions (arXiv 2104.09864), whose pairs are the halves of a head; None for no
            positions.
    Raises:
        ValueError: heads that ranks do not divide, or rotary positions for heads of an odd size; in the dry run, other
            channels; in a call, another number of tokens than the rank's own.
    Attributes:
        blockwise: computes block by block of queries, on CPUs; otherwise by torch's attention.
    """

    mixes_tokens = False  # it exchanges keys and values

    def __init__(
        self,
        dim: int,
        num_heads: int,
        context: BuildContext | None = None,
        *,
        rotary_base: float | None = 10000.0,
    ) -> None:
        super().__init__()
        context = context_for(context)
        self.local_heads = heads_per_rank(dim, num_heads, context.tp.size)
        self.head_dim = dim // num_heads
        self.rotary_base = rotary_base
        if rotary_base is not None and self.head_dim % 2:
            raise ValueError(f"rotary positions need heads of an even size, got {self.head_dim} channels")
        self._token_group = context.token_group
        self.blockwise = context.state.device.type == "cpu" and not context.numerics.traceable
        self._spans: tuple[range, ...] = ()

    def forward(self, qkv: Tensor) -> Tensor:
        if qkv.is_meta:
            self._note_input(qkv)
        is_divided = bool(self._spans) and not qkv.is_meta
        blockwise = self.blockwise and not qkv.is_meta
        tokens = qkv.shape[3]
        first = 0
        if is_divided:
            assert self._token_group is not None
            own = self._spans[self._token_group.rank]
            check_own_tokens(tokens, own)
            first = own.start
        rows = to_matrix(qkv)
        # The product of two sizes: numel() would fix the batch size in an export.
        shape = (qkv.shape[0] * qkv.shape[1], tokens, 3, self.local_heads, self.head_dim)
        if self.rotary_base is not None:
            # torch.export computes without values, and a table without values must not be cached.
            table = rotary_table.__wrapped__ if torch.compiler.is_exporting() else rotary_table
            cos, sin = table(first, tokens, self.head_dim, self.rotary_base, rows.dtype, rows.device)
            rows = _Rotate.apply(rows, cos, sin, shape, blockwise)
        if is_divided or blockwise:
            group = self._token_group if is_divided else None
            parts = TokenParts(shape, self._spans, group, self.blockwise)
            out = _CausalSoftmaxAttend.apply(rows, parts)
        else:
            q, k, v = rows.view(shape).permute(2, 0, 3, 1, 4).unbind()
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return from_matrix(out.transpose(1, 2).reshape(-1, self.local_heads * self.head_dim), qkv.shape)

    def _note_input(self, qkv: Tensor) -> None:
        channels = 3 * self.local_heads * self.head_dim
        if qkv.ndim != 4 or qkv.shape[2] != channels:
            raise ValueError(f"causal attention takes q, k and v [T, N, {channels}, L], got {[*qkv.shape]}")
        if self._token_group is not None:
            self._spans = divide_tokens(qkv.shape[3], self._token_group.size)


@lru_cache(maxsize=8)
def rotary_table(
    first: int, tokens: int, width: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[tokens, width / 2]` of the positions from `first` on; float32 for reduced types."""
    # In float64: an angle of thousands of radians has few digits left in float32.
    # The dry run allocates nothing.
    made_on = device if device.type == "meta" else torch.device("cpu")
    frequencies = base ** -(torch.arange(0, width, 2, dtype=torch.float64, device=made_on) / width)
    angles = torch.outer(torch.arange(first, first + tokens, dtype=torch.float64, device=made_on), frequencies)
    wide = sums_type(dtype)
    return angles.cos().to(device, wide), angles.sin().to(device, wide)


class _Rotate(Function):
    """Rotates q and k in rows of q, k and v. Backward rotates gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, cos: Tensor, sin: Tensor, shape: tuple[int, ...], compiled: bool) -> Tensor:
        ctx.table = cos, sin
        ctx.shape = shape
        ctx.rotate = _rotate_by_loop if compiled else _rotate
        return ctx.rotate(rows.detach(), cos, sin, shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.table
        return ctx.rotate(grad.contiguous(), cos, -sin, ctx.shape), None, None, None, None


def _rotate(rows: Tensor, cos: Tensor, sin: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) for the halves a and b of each head of q and k."""
    halves = (*shape[:-1], 2, shape[-1] // 2)
    values = rows.to(cos.dtype).view(halves)
    result = torch.empty_like(values)
    result[:, :, 2] = values[:, :, 2]
    a, b = values[:, :, :2].unbind(-2)
    first, second = result[:, :, :2].unbind(-2)
    cos = cos.view(shape[1], 1, 1, -1)
    sin = sin.view(shape[1], 1, 1, -1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)
    return result.view(rows.shape).to(rows.dtype)


def _rotate_by_loop(rows: Tensor, cos: Tensor, sin: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`_rotate` on a CPU."""
    values = rows.to(cos.dtype).view(shape)
    result = empty(shape, cos.dtype, rows.device)
    run_kernel(rotary.rotate, shape[0], values.numpy(), result.numpy(), cos.numpy(), sin.numpy())
    return result.view(rows.shape).to(rows.dtype)


@dataclass(frozen=True)
class TokenParts:
    """A rank's part of attention over tokens that ranks divide, or the whole.

    Attributes:
        shape: of q, k and v: (frames, own tokens, 3, own heads, d).
        spans: each rank's tokens, with a group.
        group: None for whole sequences.
        blockwise: computes by `causal_softmax`.
    """

    shape: tuple[int, ...]
    spans: Sequence[range]
    group: Group | None
    blockwise: bool

    @property
    def sizes(self) -> list[int]:
        """Elements in each rank's keys and values."""
        frames, _, _, heads, width = self.shape
        return [2 * frames * heads * width * len(span) for span in self.spans]

    def queries_and_keys(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Own q, and k and v of earlier and own tokens, `[frames, heads, tokens, d]` each."""
        q, k, v = rows.view(self.shape).permute(2, 0, 3, 1, 4).unbind()
        if self.group is None:
            return q, k, v
        own = rows.view(self.shape)[:, :, 1:].contiguous()
        # Not cached for a recomputed forward: keys and values of earlier tokens are as large as activations.
        received = start_to_others(own, self.sizes, self.group, to_later=True)()
        pairs = [part.view(self.shape[0], -1, *own.shape[2:]) for part in received]
        k, v = torch.cat([*pairs, own], dim=1).permute(2, 0, 3, 1, 4).unbind()
        return q, k, v

    def add_gradients(self, grad_own: Tensor, grad_earlier: Tensor) -> None:
        """Sends gradients to earlier ranks, and adds the gradients from later ranks.

        Args:
            grad_own: of own keys and values, `[frames, tokens, 2, heads, d]`, in float32 or wider.
            grad_earlier: of all earlier ranks' keys and values, in the type that is sent.
        """
        assert self.group is not None
        rank = self.group.rank
        sizes = self.sizes
        to_ranks = [size if other < rank else 0 for other, size in enumerate(sizes)]
        from_ranks = [sizes[rank] if other > rank else 0 for other in range(self.group.size)]
        parts = grad_earlier.split([len(span) for span in self.spans[:rank]], dim=1)
        outgoing = torch.cat([grad_earlier.new_empty(0), *[part.reshape(-1) for part in parts]])
        # In rank order: a fixed order of sums.
        for part in start_exchange(outgoing, to_ranks, from_ranks, self.group)():
            if part.numel():
                grad_own += part.view(grad_own.shape)


class _CausalSoftmaxAttend(Function):
    """Rotated rows of q, k, v -> `[frames, heads, tokens, d]`, with the keys and values of earlier ranks.

    Backward keeps the rows, and computes the attention again.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, parts: TokenParts) -> Tensor:
        ctx.parts = parts
        ctx.save_for_backward(rows)
        attend = causal_softmax.attend if parts.blockwise else _attend
        return attend(*parts.queries_and_keys(rows))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        parts: TokenParts = ctx.parts
        inputs = parts.queries_and_keys(rows)
        frames, tokens, _, heads, width = parts.shape
        # Sums over ranks are rounded once.
        grad_rows = empty(parts.shape, sums_type(rows.dtype), rows.device)
        grad_pairs = grad_rows[:, :, 1:]
        if parts.group is not None:
            grad_pairs = grad_rows.new_empty((frames, inputs[1].shape[2], 2, heads, width))
        grad_keys, grad_values = grad_pairs.permute(2, 0, 3, 1, 4).unbind()
        results = grad_rows[:, :, 0].transpose(1, 2), grad_keys, grad_values
        attend_gradients = causal_softmax.attend_gradients if parts.blockwise else _attend_gradients
        attend_gradients(inputs, grad, results)
        if parts.group is not None:
            grad_rows[:, :, 1:] = grad_pairs[:, -tokens:]
            parts.add_gradients(grad_rows[:, :, 1:], grad_pairs[:, :-tokens].to(rows.dtype))
        return grad_rows.view(rows.shape).to(rows.dtype), None


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`causal_softmax.attend` by torch's attention."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]))


def _attend_gradients(
    inputs: tuple[Tensor, Tensor, Tensor], grad: Tensor, results: tuple[Tensor, Tensor, Tensor]
) -> None:
    """`causal_softmax.attend_gradients` by torch's attention."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    with torch.enable_grad():
        out = _attend(*leaves)
    for result, gradient in zip(results, torch.autograd.grad(out, leaves, grad), strict=True):
        result.copy_(gradient)
