"""Causal attention on spikes without softmax: o_i = q_i (sum over j <= i of k_j^T v_j) in each head.

The sums are a state of d x d whole numbers, so that the cost is linear in the number of tokens and the result has the
same bits in any order of sums. Linear attention in chunks: Hua et al. 2022 (arXiv 2202.10447, section 3.2). Ranks that
divide the tokens exchange their states alone: LASP-2 (arXiv 2502.07563).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.common.autograd import Function
from megasnn.common.recompute import cached_collective, is_replaying
from megasnn.kernels.layout import empty
from megasnn.kernels.spike_codec import Content, bits_of, decode_into, encode
from megasnn.layers.attention import SCALE, heads_per_rank, sums_type
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.shape_inference import content_of
from megasnn.layers.token_context import start_to_others
from megasnn.parallel.collectives import Exchange, from_matrix, to_matrix
from megasnn.parallel_state import Group

CHUNK = 64
"""Tokens in a chunk. Inside a chunk the cost grows with its length, between chunks with d."""


class CausalSpikingAttention(nn.Module):
    """Causal attention without softmax on spikes, 0 and 1 or ternary: `[T, N, 3 C_local, L]` -> `[T, N, C_local, L]`.

    Input channels are the blocks q, k, v, each of this rank's heads. The output is `scale` times whole numbers, exact
    before it is rounded to the compute type; every layout and chunk gives the same bits. Backward keeps q, k and v as
    bits. It has no weights. On a GPU --precision tf32 rounds products with sums above 2,048.

    Args:
        dim: C, global.
        chunk: tokens in a chunk; changes no bit of the output.
    Raises:
        ValueError: heads that ranks do not divide; in the dry run, an input that is not known to be spikes, and sums
            that float32 does not hold exactly; in a call, more tokens than in the dry run.
    """

    mixes_tokens = False  # it exchanges the states

    def __init__(
        self,
        dim: int,
        num_heads: int,
        context: BuildContext | None = None,
        *,
        scale: float = SCALE,
        chunk: int = CHUNK,
    ) -> None:
        super().__init__()
        context = context_for(context)
        self.local_heads = heads_per_rank(dim, num_heads, context.tp.size)
        self.head_dim = dim // num_heads
        self._group = context.token_group
        self._dtype = context.numerics.compute_dtype
        self._traceable = context.numerics.traceable
        # The dry run and each call fill in the rest.
        self._options = StateOptions(self.local_heads, frames=0, scale=scale, chunk_tokens=chunk)

    def forward(self, qkv: Tensor) -> Tensor:
        if qkv.is_meta:
            self._learn_input(qkv)
        elif qkv.shape[3] > self._options.length:
            raise ValueError(f"a sequence has {qkv.shape[3]} tokens, and the dry run saw {self._options.length}")
        # The product of two sizes: numel() would fix the batch size in an export.
        options = replace(self._options, frames=qkv.shape[0] * qkv.shape[1])
        rows = to_matrix(qkv)
        if qkv.is_meta or self._traceable:
            out = attend_causally(rows, options)
        else:
            out = CausalAttend.apply(rows, bits_of(qkv, options.content), options)
        return from_matrix(out, qkv.shape)

    def _learn_input(self, qkv: Tensor) -> None:
        channels = 3 * self.local_heads * self.head_dim
        if qkv.ndim != 4 or qkv.shape[2] != channels:
            raise ValueError(f"causal attention takes q, k and v [T, N, {channels}, L], got {[*qkv.shape]}")
        content = content_of(qkv)
        if not content.is_bits:
            raise ValueError("causal attention without softmax takes spikes: let a neuron fire behind q, k and v")
        length = qkv.shape[3]
        # An entry of the output has at most d terms, each at most the number of tokens.
        largest = self.head_dim * length
        exact = exact_up_to(sums_type(self._dtype))
        if largest > exact:
            raise ValueError(
                f"{length} tokens with heads of {self.head_dim} channels give sums up to {largest}, and float32 holds "
                f"whole numbers up to {exact}: use --precision fp64, more heads or fewer tokens"
            )
        self._options = replace(self._options, content=content, length=length, group=self._group)


def exact_up_to(dtype: torch.dtype) -> int:
    """The largest number up to which a type holds every whole number."""
    return round(2 / torch.finfo(dtype).eps)


@dataclass(frozen=True)
class StateOptions:
    """Sizes in causal attention.

    Attributes:
        heads: on this rank.
        frames: time steps times samples.
        scale: factor of the output.
        chunk_tokens: tokens in a chunk.
        content: of q, k and v.
        length: tokens on all ranks.
        group: ranks that divide the tokens; None without.
    """

    heads: int
    frames: int
    scale: float
    chunk_tokens: int
    content: Content = Content.SPIKES
    length: int = 0
    group: Group | None = None

    @property
    def state_type(self) -> torch.dtype:
        """The smallest type for a state, whose entries are up to the number of tokens."""
        return torch.int16 if self.length <= torch.iinfo(torch.int16).max else torch.int32

    def chunks(self, rows: Tensor, blocks: int, dtype: torch.dtype) -> Tensor:
        """Rows `[frames * L, blocks * heads * d]` as `[blocks, frames, heads, chunks, chunk_tokens, d]`.

        Zeros fill the last chunk: they change no sum.
        """
        tokens = rows.shape[0] // self.frames
        by_head = rows.view(self.frames, tokens, blocks, self.heads, -1).permute(2, 0, 3, 1, 4)
        count = -(-tokens // self.chunk_tokens)
        shape = (*by_head.shape[:3], count * self.chunk_tokens, by_head.shape[4])
        whole = rows.new_empty(shape, dtype=dtype)
        whole[:, :, :, :tokens] = by_head
        whole[:, :, :, tokens:] = 0
        return whole.unflatten(3, (count, self.chunk_tokens))

    def rows(self, blocks: Tensor, tokens: int) -> Tensor:
        """Inverse of `chunks`, for any number of blocks."""
        by_head = blocks.flatten(3, 4)[:, :, :, :tokens]
        return by_head.permute(1, 3, 0, 2, 4).reshape(self.frames * tokens, -1)


def attend_causally(rows: Tensor, options: StateOptions) -> Tensor:
    """`CausalAttend` in torch functions alone, for one rank."""
    q, k, v = options.chunks(rows, 3, sums_type(rows.dtype)).unbind()
    states = k.transpose(-2, -1) @ v
    out = (q @ k.transpose(-2, -1)).tril() @ v + q @ (states.cumsum(2) - states)
    return options.rows(out[None] * options.scale, rows.shape[0] // options.frames).to(rows.dtype)


class CausalAttend(Function):
    """Causal attention product: q, k, v `[frames * L, 3 * heads * d]` -> `[frames * L, heads * d]`.

    `bits`: the packed rows, if known.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bits: Tensor | None, options: StateOptions) -> Tensor:
        ctx.options = options
        ctx.shape = rows.shape
        ctx.dtype = rows.dtype
        packed = None
        if ctx.needs_input_grad[0]:
            packed = encode(rows.reshape(-1), options.content, check=True) if bits is None else bits
        q, k, v = options.chunks(rows, 3, sums_type(rows.dtype)).unbind()
        states = k.transpose(-2, -1) @ v
        exchange = None
        if options.group is not None and not is_replaying():
            exchange = _start_states(states.sum(2).to(options.state_type), options.group, to_later=True)
        # The chunks' own products need no other rank: they are computed while states travel.
        out = (q @ k.transpose(-2, -1)).tril_() @ v
        earlier = None
        if options.group is not None:
            # A recomputed forward has sent nothing: it takes the parts of the first one.
            parts = cached_collective(lambda: [] if exchange is None else exchange())
            earlier = _sum_of_states(parts, states, options.state_type)
        _add_product(out, q, _sums_before(states, earlier))
        # One or two bits a value, and the earlier ranks' state, are kept for backward.
        kept = None if earlier is None else earlier.to(options.state_type)
        ctx.save_for_backward(packed, kept)
        out *= options.scale
        return options.rows(out[None], rows.shape[0] // options.frames).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Computes in float32 or wider."""
        packed, kept = ctx.saved_tensors
        options: StateOptions = ctx.options
        dtype = sums_type(grad.dtype)
        spikes = empty(ctx.shape, dtype, grad.device)
        decode_into(packed, options.content, spikes)
        q, k, v = options.chunks(spikes, 3, dtype).unbind()
        grad_out = options.chunks(grad.contiguous(), 1, dtype)[0]
        grad_out *= options.scale
        # What each chunk's outputs add to the gradients of all earlier chunks' states.
        grad_states = q.transpose(-2, -1) @ grad_out
        exchange = None
        if options.group is not None:
            # An output's gradient reaches the states of its own and of earlier tokens: it travels to earlier ranks.
            exchange = _start_states(grad_states.sum(2), options.group, to_later=False)
        scores = (q @ k.transpose(-2, -1)).tril_()
        grad_scores = (grad_out @ v.transpose(-2, -1)).tril_()
        before = _sums_before(k.transpose(-2, -1) @ v, None if kept is None else kept.to(dtype))
        grad_qkv = torch.empty((3, *q.shape), dtype=dtype, device=q.device)
        grad_q, grad_k, grad_v = grad_qkv.unbind()
        torch.matmul(grad_scores, k, out=grad_q)
        _add_product(grad_q, grad_out, before.transpose(-2, -1))
        torch.matmul(grad_scores.transpose(-2, -1), q, out=grad_k)
        torch.matmul(scores.transpose(-2, -1), grad_out, out=grad_v)
        later = None
        if exchange is not None:
            later = _sum_of_states(exchange(), grad_states, dtype)
        after = _sums_before(grad_states.flip(2), later).flip(2)
        _add_product(grad_k, v, after.transpose(-2, -1))
        _add_product(grad_v, k, after)
        tokens = ctx.shape[0] // options.frames
        return options.rows(grad_qkv, tokens).to(ctx.dtype), None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b for matrices `[F, heads, chunks, ...]`, without memory for the product."""
    total.flatten(0, 2).baddbmm_(a.flatten(0, 2), b.flatten(0, 2))


def _start_states(own: Tensor, group: Group, to_later: bool) -> Exchange:
    """Sends a state `[F, heads, d, d]` to all later or earlier ranks, as bytes."""
    # NCCL knows no integers of two bytes.
    data = own.contiguous().view(torch.uint8)
    return start_to_others(data, [data.numel()] * group.size, group, to_later)


def _sum_of_states(parts: Sequence[Tensor], states: Tensor, sent_type: torch.dtype) -> Tensor:
    """Sum of the ranks' states `[F, heads, d, d]`, received in `sent_type`, in rank order and the type of `states`."""
    total = torch.zeros_like(states[:, :, 0])
    for part in parts:
        total += part.view(sent_type).view(total.shape)
    return total


def _sums_before(states: Tensor, first: Tensor | None) -> Tensor:
    """Sums over earlier chunks, for each chunk of `[F, heads, chunks, d, d]`. `first`: before the first chunk."""
    sums = torch.empty_like(states)
    sums[:, :, 0] = 0 if first is None else first
    # No cumsum: on a GPU it is not deterministic, and on a CPU it adds number by number.
    for chunk in range(1, states.shape[2]):
        torch.add(sums[:, :, chunk - 1], states[:, :, chunk - 1], out=sums[:, :, chunk])
    return sums
