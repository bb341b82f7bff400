"""Causal attention with softmax and rotary positions, sharded by heads and, under context parallelism, by tokens."""

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
from megasnn.layers.attention import heads_per_rank, sums_type
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.token_context import check_own_tokens, shared_tokens, start_to_others
from megasnn.parallel.collectives import Exchange, from_matrix, start_exchange, to_matrix
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
        in_parts: with divided tokens, attention over each rank's keys by itself; otherwise over all keys at once.
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
        self._group = context.token_group
        # Only a CPU's kernel takes any type and returns the sums of exponentials, by which parts are put together.
        self.in_parts = context.state.device.type == "cpu"
        self._spans: tuple[range, ...] = ()

    def forward(self, qkv: Tensor) -> Tensor:
        if qkv.is_meta:
            self._learn_input(qkv)
        tokens = qkv.shape[3]
        first = 0
        if self._spans and not qkv.is_meta and self._group is not None:
            own = self._spans[self._group.rank]
            check_own_tokens(tokens, own)
            first = own.start
        rows = to_matrix(qkv)
        # The product of two sizes: numel() would fix the batch size in an export.
        shape = (qkv.shape[0] * qkv.shape[1], tokens, 3, self.local_heads, self.head_dim)
        if self.rotary_base is not None:
            cos, sin = rotary_table(first, tokens, self.head_dim, self.rotary_base, rows.dtype, rows.device)
            rows = _Rotate.apply(rows, cos, sin, shape)
        if self._spans and not qkv.is_meta and self._group is not None:
            attend = _AttendInParts if self.in_parts else _AttendToAll
            out = attend.apply(rows, TokenParts(shape, self._spans, self._group))
        else:
            q, k, v = rows.view(shape).permute(2, 0, 3, 1, 4).unbind()
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return from_matrix(out.transpose(1, 2).reshape(-1, self.local_heads * self.head_dim), qkv.shape)

    def _learn_input(self, qkv: Tensor) -> None:
        channels = 3 * self.local_heads * self.head_dim
        if qkv.ndim != 4 or qkv.shape[2] != channels:
            raise ValueError(f"causal attention takes q, k and v [T, N, {channels}, L], got {[*qkv.shape]}")
        if self._group is not None:
            self._spans = shared_tokens(qkv.shape[3], self._group.size)


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
    def forward(ctx: Any, rows: Tensor, cos: Tensor, sin: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.table = cos, sin
        ctx.shape = shape
        return _rotated(rows, cos, sin, shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.table
        return _rotated(grad.contiguous(), cos, -sin, ctx.shape), None, None, None


def _rotated(rows: Tensor, cos: Tensor, sin: Tensor, shape: tuple[int, ...]) -> Tensor:
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


@dataclass(frozen=True)
class TokenParts:
    """A rank's part of attention over tokens that ranks divide.

    Attributes:
        shape: of q, k and v: (frames, own tokens, 3, own heads, d).
        spans: each rank's tokens.
    """

    shape: tuple[int, ...]
    spans: Sequence[range]
    group: Group

    @property
    def sizes(self) -> list[int]:
        """Elements in each rank's keys and values."""
        frames, _, _, heads, width = self.shape
        return [2 * frames * heads * width * len(span) for span in self.spans]

    def start_earlier(self, rows: Tensor) -> Exchange:
        """Starts receiving the earlier ranks' keys and values, and sending the own ones to later ranks."""
        own = rows.view(self.shape)[:, :, 1:].contiguous()
        return start_to_others(own, self.sizes, self.group, to_later=True)

    def start_gradients(self, gradients: Sequence[Tensor], like: Tensor) -> Exchange:
        """Starts returning the gradients of the earlier ranks' keys and values. `like`: of their type and device."""
        rank = self.group.rank
        sizes = self.sizes
        to_ranks = [size if other < rank else 0 for other, size in enumerate(sizes)]
        from_ranks = [sizes[rank] if other > rank else 0 for other in range(self.group.size)]
        outgoing = torch.cat([like.new_empty(0), *[each.reshape(-1) for each in gradients]])
        return start_exchange(outgoing, to_ranks, from_ranks, self.group)

    def summed_gradients(self, rows: Tensor, of_rows: Tensor, of_parts: Sequence[Tensor]) -> Tensor:
        """Gradient of own rows, summed over ranks and rounded once.

        Args:
            of_rows: this rank's part `[frames, tokens, 3, heads, d]`, in float32 or wider. It is changed.
            of_parts: of each earlier rank's keys and values, `[frames, tokens, 2, heads, d]`.
        """
        finish = self.start_gradients(of_parts, rows)
        # In rank order: a fixed order of sums.
        for part in finish():
            if part.numel():
                of_rows[:, :, 1:] += part.view(of_rows[:, :, 1:].shape)
        return of_rows.view(rows.shape).to(rows.dtype)

    def with_earlier_keys(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Own q, and k and v of all earlier and own tokens, `[frames, heads, tokens, d]` each."""
        exchange = self.start_earlier(rows)
        q, k, v = rows.view(self.shape).permute(2, 0, 3, 1, 4).unbind()
        pairs = [self.keys_and_values(part, rank) for rank, part in enumerate(exchange())]
        keys, values = zip(*pairs, (k, v), strict=True)
        return q, torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def keys_and_values(self, part: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """A rank's keys and values, `[frames, heads, tokens, d]` each."""
        frames, _, _, heads, width = self.shape
        k, v = part.view(frames, len(self.spans[rank]), 2, heads, width).permute(2, 0, 3, 1, 4).unbind()
        return k, v


# Public functions return no logarithms of the sums of exponentials, by which attention over some of the keys is put
# together. torch's own ring attention takes these operators too.


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention `[F, heads, tokens, d]`, and the logarithm of each row's sum of exponentials."""
    out, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, logs


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. `out`, `logs`: over all keys, of which `k` may be a part."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_q, of_k, of_v = backward(grad, q, k, v, out, logs, 0.0, causal)
    return of_q, of_k, of_v


class _AttendInParts(Function):
    """Rotated rows of q, k, v -> `[frames, heads, tokens, d]`, with the keys and values of earlier ranks.

    Attention over each rank's keys has its own softmax. The logarithms of the sums of exponentials put the parts
    together, and give each part's gradients (ring attention, arXiv 2310.01889).
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, parts: TokenParts) -> Tensor:
        # Not cached for a recomputed forward: keys and values of earlier tokens are as large as activations.
        exchange = parts.start_earlier(rows)
        q, k, v = rows.view(parts.shape).permute(2, 0, 3, 1, 4).unbind()
        own, logs = _flash(q, k, v, causal=True)
        out = own.to(logs.dtype)
        for rank, part in enumerate(exchange()):
            of_part, logs_of_part = _flash(q, *parts.keys_and_values(part, rank), causal=False)
            both = torch.logaddexp(logs, logs_of_part)
            out = out * (logs - both).exp().unsqueeze(-1) + of_part * (logs_of_part - both).exp().unsqueeze(-1)
            logs = both
        out = out.to(rows.dtype)
        ctx.parts = parts
        ctx.save_for_backward(rows, out, logs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows, out, logs = ctx.saved_tensors
        parts: TokenParts = ctx.parts
        exchange = parts.start_earlier(rows)
        q, k, v = rows.view(parts.shape).permute(2, 0, 3, 1, 4).unbind()
        # Sums over ranks are rounded once.
        wide = sums_type(rows.dtype)
        of_own = _flash_backward(grad, q, k, v, out, logs, causal=True)
        of_rows = torch.stack([each.transpose(1, 2).to(wide) for each in of_own], dim=2)
        of_parts = []
        for rank, part in enumerate(exchange()):
            keys, values = parts.keys_and_values(part, rank)
            of_queries, *of_part = _flash_backward(grad, q, keys, values, out, logs, causal=False)
            of_rows[:, :, 0] += of_queries.transpose(1, 2)
            of_parts.append(torch.stack([each.transpose(1, 2) for each in of_part], dim=2))
        return parts.summed_gradients(rows, of_rows, of_parts), None


class _AttendToAll(Function):
    """As `_AttendInParts`, by attention over all keys at once; backward computes it again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, parts: TokenParts) -> Tensor:
        ctx.parts = parts
        ctx.save_for_backward(rows)
        return _attention(*parts.with_earlier_keys(rows))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        parts: TokenParts = ctx.parts
        inputs = [each.detach().requires_grad_() for each in parts.with_earlier_keys(rows)]
        with torch.enable_grad():
            out = _attention(*inputs)
        of_q, *of_all = torch.autograd.grad(out, inputs, grad)
        pairs = torch.stack([each.transpose(1, 2) for each in of_all], dim=2)
        lengths = [len(span) for span in parts.spans[: parts.group.rank + 1]]
        *of_earlier, of_own = pairs.split(lengths, dim=1)
        of_rows = torch.cat([of_q.transpose(1, 2).unsqueeze(2), of_own], dim=2).to(sums_type(rows.dtype))
        return parts.summed_gradients(rows, of_rows, of_earlier), None


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention `[F, heads, tokens, d]` of the last tokens to all: the last query sees every key."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]))
