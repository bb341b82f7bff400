"""Causal attention on spikes without softmax: o_i = q_i (sum over j <= i of k_j^T v_j) in each head.

The sums are a state of d x d whole numbers, so that the cost is linear in the number of tokens and the result has the
same bits in any order of sums. Linear attention in chunks: Hua et al. 2022 (arXiv 2202.10447, section 3.2). Ranks that
divide the tokens exchange their states alone: LASP-2 (arXiv 2502.07563).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.common.autograd import Function
from megasnn.common.recompute import cached_collective
from megasnn.kernels.layout import empty
from megasnn.kernels.spike_codec import bits_of, decode_into, encode
from megasnn.layers.attention import SCALE, heads_per_rank, sums_type
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.shape_inference import content_of
from megasnn.layers.token_chunks import CausalSpikingAttendSizes, Part
from megasnn.layers.token_context import check_own_tokens, divide_tokens, start_to_others
from megasnn.parallel.collectives import from_matrix, to_matrix
from megasnn.parallel_state import Group

CHUNK = 64
"""Tokens in a chunk. Inside a chunk the cost grows with its length, between chunks with d."""
EXACT_TF32 = 2**11
"""TF32 holds every whole number up to this one."""


class CausalSpikingAttention(nn.Module):
    """Causal attention on spikes without softmax: `[T, N, 3 C_local, L]` -> `[T, N, C_local, L]`.

    Spikes are 0 and 1, or ternary. Input channels are the blocks q, k, v, each of this rank's heads. The output is
    `scale` times whole numbers, exact before it is rounded to the compute type; every layout and chunk gives the same
    bits. Backward keeps q, k and v as bits. It has no weights.

    Args:
        dim: C, global.
        chunk: tokens in a chunk; changes no bit of the output.
    Raises:
        ValueError: heads that ranks do not divide; in the dry run, an input that is not known to be spikes, and sums
            that the products do not hold exactly; in a call, more tokens than in the dry run or than the rank's own.
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
        self._token_group = context.token_group
        self._dtype = context.numerics.compute_dtype
        self._rounds = context.numerics.rounds
        self._traceable = context.numerics.traceable
        # The dry run and each call fill in the rest.
        width = self.local_heads * self.head_dim
        self._sizes = CausalSpikingAttendSizes(self.local_heads, width, frames=0, scale=scale, chunk_tokens=chunk)

    def forward(self, qkv: Tensor) -> Tensor:
        if qkv.is_meta:
            self._note_input(qkv)
        elif self._token_group is not None:
            spans = divide_tokens(self._sizes.length, self._token_group.size)
            check_own_tokens(qkv.shape[3], spans[self._token_group.rank])
        elif qkv.shape[3] > self._sizes.length:
            raise ValueError(f"a sequence has {qkv.shape[3]} tokens, and the dry run saw {self._sizes.length}")
        # The product of two sizes: numel() would fix the batch size in an export.
        sizes = replace(self._sizes, frames=qkv.shape[0] * qkv.shape[1])
        rows = to_matrix(qkv)
        if qkv.is_meta or self._traceable:
            out = causal_spiking_attend(rows, sizes)
        else:
            out = CausalSpikingAttend.apply(rows, bits_of(qkv, sizes.content), sizes)
        return from_matrix(out, qkv.shape)

    def _note_input(self, qkv: Tensor) -> None:
        channels = 3 * self.local_heads * self.head_dim
        if qkv.ndim != 4 or qkv.shape[2] != channels:
            raise ValueError(f"causal attention takes q, k and v [T, N, {channels}, L], got {[*qkv.shape]}")
        content = content_of(qkv)
        if not content.is_bits:
            raise ValueError(
                "causal attention without softmax takes spikes: put a spiking neuron after the projection to q, k and v"
            )
        length = qkv.shape[3]
        # An entry of the output has at most d terms, each at most the number of tokens.
        largest = self.head_dim * length
        exact = exact_up_to(sums_type(self._dtype))
        if largest > exact:
            raise ValueError(
                f"{length} tokens with heads of {self.head_dim} channels give sums up to {largest}, and float32 holds "
                f"whole numbers up to {exact}: use --precision fp64, more heads or fewer tokens"
            )
        if self._rounds and length > EXACT_TF32:
            raise ValueError(
                f"{length} tokens give states up to {length}, and --precision tf32 rounds whole numbers above "
                f"{EXACT_TF32}: use --precision bf16, whose states are float32, or fp32"
            )
        self._sizes = replace(self._sizes, content=content, length=length, group=self._token_group)


def exact_up_to(dtype: torch.dtype) -> int:
    """The largest number up to which a type holds every whole number."""
    return round(2 / torch.finfo(dtype).eps)


def causal_spiking_attend(rows: Tensor, sizes: CausalSpikingAttendSizes) -> Tensor:
    """`CausalSpikingAttend` in torch functions alone, for one rank."""
    everything = slice(None)
    q, k, v = sizes.chunks(rows, sums_type(rows.dtype), everything, everything).unbind()
    states = k.transpose(-2, -1) @ v
    out = (q @ k.transpose(-2, -1)).tril() @ v + q @ (states.cumsum(2) - states)
    tokens = rows.shape[0] // sizes.frames
    by_head = (out * sizes.scale).flatten(2, 3)[:, :, :tokens]
    return by_head.transpose(1, 2).reshape(len(rows), -1).to(rows.dtype)


class CausalSpikingAttend(Function):
    """Causal attention product: q, k, v `[frames * L, 3 * heads * d]` -> `[frames * L, heads * d]`.

    `bits`: the packed rows, if known.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bits: Tensor | None, sizes: CausalSpikingAttendSizes) -> Tensor:
        ctx.sizes = sizes
        ctx.shape = rows.shape
        ctx.dtype = rows.dtype
        packed = None
        if ctx.needs_input_grad[0]:
            packed = encode(rows.reshape(-1), sizes.content, check=True) if bits is None else bits
        earlier = _state_of_earlier_ranks(rows, sizes)
        # One or two bits a value, and the earlier ranks' state, are kept for backward.
        kept = None if earlier is None else earlier.to(sizes.state_type)
        ctx.save_for_backward(packed, kept)
        out = empty((len(rows), sizes.width), rows.dtype, rows.device)
        for frames, spans in sizes.parts_of(rows):
            state = None if earlier is None else earlier[frames]
            for span in spans:
                q, k, v = sizes.chunks(rows, sums_type(rows.dtype), frames, span).unbind()
                states = k.transpose(-2, -1) @ v
                before = _sums_before(states, state)
                state = before[:, :, -1] + states[:, :, -1]
                attended = (q @ k.transpose(-2, -1)).tril_() @ v
                _add_product(attended, q, before)
                sizes.put(out, attended.mul_(sizes.scale)[None], frames, span)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Computes in float32 or wider."""
        packed, kept = ctx.saved_tensors
        sizes: CausalSpikingAttendSizes = ctx.sizes
        dtype = sums_type(grad.dtype)
        # On a CPU whole numbers of a byte: they are converted span by span.
        unpacked_type = torch.int8 if grad.device.type == "cpu" else dtype
        spikes = empty(ctx.shape, unpacked_type, grad.device)
        decode_into(packed, sizes.content, spikes)
        grad = grad.contiguous()
        later = _grad_of_later_ranks(spikes[:, : sizes.width], grad, sizes)
        grad_rows = empty(ctx.shape, ctx.dtype, grad.device)
        for part in sizes.parts_of(spikes):
            frames, spans = part
            # Tokens from the last to the first: the gradient of the states flows to earlier tokens. Start from the
            # state after all tokens and subtract each span's states: sums of whole numbers make this exact.
            state = _state(spikes, sizes, dtype, part)
            if kept is not None:
                state += kept[frames]
            after = None if later is None else later[frames]
            for span in reversed(spans):
                q, k, v = sizes.chunks(spikes, dtype, frames, span).unbind()
                grad_out = sizes.chunks(grad, dtype, frames, span)[0].mul_(sizes.scale)
                states = k.transpose(-2, -1) @ v
                state = state - states.sum(2)
                # Each chunk's addend to the gradients of all earlier chunks' states.
                grad_states = (q.transpose(-2, -1) @ grad_out).flip(2)
                sums_after = _sums_before(grad_states, after)
                after = sums_after[:, :, -1] + grad_states[:, :, -1]
                grads = _gradients(q, k, v, grad_out, _sums_before(states, state), sums_after.flip(2))
                sizes.put(grad_rows, grads, frames, span)
        return grad_rows, None, None


def _gradients(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Gradients of q, k and v, `[3, F, heads, chunks, chunk_tokens, d]`.

    Args:
        before: states of all earlier tokens, for each chunk.
        after: gradients of the state from all later tokens.
    """
    scores = (q @ k.transpose(-2, -1)).tril_()
    grad_scores = (grad_out @ v.transpose(-2, -1)).tril_()
    grads = torch.empty((3, *q.shape), dtype=q.dtype, device=q.device)
    grad_q, grad_k, grad_v = grads.unbind()
    torch.matmul(grad_scores, k, out=grad_q)
    _add_product(grad_q, grad_out, before.transpose(-2, -1))
    torch.matmul(grad_scores.transpose(-2, -1), q, out=grad_k)
    _add_product(grad_k, v, after.transpose(-2, -1))
    torch.matmul(scores.transpose(-2, -1), grad_out, out=grad_v)
    _add_product(grad_v, k, after)
    return grads


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b for matrices `[F, heads, chunks, ...]`, without memory for the product."""
    total.flatten(0, 2).baddbmm_(a.flatten(0, 2), b.flatten(0, 2))


def _sum_of_products(a: Tensor, b: Tensor, sizes: CausalSpikingAttendSizes, dtype: torch.dtype, part: Part) -> Tensor:
    """Sum over tokens of a^T b for the part's F frames: `[frames * L, heads * d]` -> `[F, heads, d, d]`."""
    frames, spans = part
    sums = []
    for span in spans:
        left = sizes.chunks(a, dtype, frames, span)[0]
        right = sizes.chunks(b, dtype, frames, span)[0]
        sums.append((left.transpose(-2, -1) @ right).sum(2))
    return torch.stack(sums).sum(0)


def _state(rows: Tensor, sizes: CausalSpikingAttendSizes, dtype: torch.dtype, part: Part) -> Tensor:
    """State after all own tokens, from rows of q, k and v."""
    _, k, v = rows.split(sizes.width, dim=1)
    return _sum_of_products(k, v, sizes, dtype, part)


def _state_of_earlier_ranks(rows: Tensor, sizes: CausalSpikingAttendSizes) -> Tensor | None:
    """State `[frames, heads, d, d]` after the earlier ranks' tokens; None if ranks divide no tokens."""
    group = sizes.group
    if group is None:
        return None
    dtype = sums_type(rows.dtype)

    def exchange() -> list[Tensor]:
        own = torch.cat([_state(rows, sizes, dtype, part) for part in sizes.parts_of(rows)])
        return _exchange_states(own.to(sizes.state_type), group, to_later=True)

    # A recomputed forward takes the states of the first one.
    received = cached_collective(exchange)
    return _sum_of_states(received, sizes.state_type, sizes, rows.new_empty(0, dtype=dtype))


def _grad_of_later_ranks(q: Tensor, grad: Tensor, sizes: CausalSpikingAttendSizes) -> Tensor | None:
    """Gradient `[frames, heads, d, d]` of the state after own tokens, from the later ranks' outputs."""
    if sizes.group is None:
        return None
    dtype = sums_type(grad.dtype)
    own = torch.cat([_sum_of_products(q, grad, sizes, dtype, part) for part in sizes.parts_of(q)])
    received = _exchange_states(own * sizes.scale, sizes.group, to_later=False)
    return _sum_of_states(received, dtype, sizes, own)


def _exchange_states(own: Tensor, group: Group, to_later: bool) -> list[Tensor]:
    """Sends a state to all later or earlier ranks; returns the others' states, as bytes."""
    # NCCL knows no integers of two bytes.
    data = own.contiguous().view(torch.uint8)
    return start_to_others(data, [data.numel()] * group.size, group, to_later)()


def _sum_of_states(
    received: Sequence[Tensor], sent_type: torch.dtype, sizes: CausalSpikingAttendSizes, like: Tensor
) -> Tensor:
    """Sum of the ranks' states `[frames, heads, d, d]`, in rank order and the type of `like`."""
    d = sizes.width // sizes.heads
    total = like.new_zeros((sizes.frames, sizes.heads, d, d))
    for part in received:
        total += part.view(sent_type).view(total.shape)
    return total


def _sums_before(states: Tensor, first: Tensor | None) -> Tensor:
    """Sums before each chunk of `[F, heads, chunks, d, d]`. `first`: the sum before the first chunk."""
    sums = torch.empty_like(states)
    if first is None:
        sums[:, :, 0].zero_()
    else:
        sums[:, :, 0] = first
    # No cumsum: on a GPU it is not deterministic, and on a CPU it adds number by number.
    for chunk in range(1, states.shape[2]):
        torch.add(sums[:, :, chunk - 1], states[:, :, chunk - 1], out=sums[:, :, chunk])
    return sums
