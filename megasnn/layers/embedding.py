"""Token embedding, divided by vocabulary over tensor-parallel ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.common.autograd import Function
from megasnn.common.recompute import cached_collective
from megasnn.kernels.spike_codec import Content
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.init import trunc_normal
from megasnn.layers.tensors import declare
from megasnn.layers.weight_grad import QueueGradient
from megasnn.parallel.collectives import from_matrix, gather_columns, sum_and_scatter_columns
from megasnn.parallel.sharding import Initialiser, own_span
from megasnn.parallel_state import Group


class ParallelEmbedding(nn.Module):
    """Embedding: tokens `[1, N, L]` -> `[1, N, C_local, L]`.

    Each rank looks up the tokens of its part of the vocabulary, with all channels. A sum over ranks leaves each its own
    channels. Ranks divide the vocabulary as evenly as possible, so any size fits any number of ranks.

    Args:
        vocab_size: number of tokens in the vocabulary.
        channels: C, global.
        length: learned positions, added to the tokens' vectors; 0 for none.
    Raises:
        ValueError: a vocabulary smaller than the number of ranks; channels that ranks do not divide; in the dry run,
            more tokens than positions.
    """

    cut_inputs = (False,)  # the tokens are whole on every rank
    mixes_tokens = False
    weight: Tensor
    positions: Tensor | None

    def __init__(
        self,
        vocab_size: int,
        channels: int,
        context: BuildContext | None = None,
        *,
        length: int = 0,
        initialise: Initialiser = trunc_normal,
    ) -> None:
        super().__init__()
        context = context_for(context)
        self.vocab_size = vocab_size
        self.channels = channels
        self._group = context.tp
        self._own = own_vocabulary(vocab_size, context.tp)
        self._local_channels, rest = divmod(channels, context.tp.size)
        if rest:
            raise ValueError(f"{channels} channels do not divide by --tensor-model-parallel-size {context.tp.size}")
        self._compute_dtype = context.numerics.compute_dtype
        self._traceable = context.numerics.traceable
        self._weight_gradients = context.weight_gradients
        self._token_group = context.token_group
        self._length = 0  # of whole sequences
        shard = context.shard((vocab_size, channels), 0, even=False, initialise=initialise)
        declare(self, "weight", shard, context.dtype)
        self.register_parameter("positions", None)
        if length:
            declare(self, "positions", context.shard((length, channels), 1, initialise=initialise), context.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.is_meta:
            return self._dry_run(tokens)
        steps, samples, length = tokens.shape
        ids = tokens.reshape(-1)
        if self._traceable:
            rows = F.embedding(ids, self.weight)
        else:
            anchor, queue_gradient = self._weight_gradients.outside_autograd(self.weight)
            rows = _Lookup.apply(ids, self.weight.detach(), anchor, queue_gradient, self._own, self._group)
        found = from_matrix(rows, (steps, samples, self._local_channels, length))
        if self.positions is not None:
            first = 0
            if self._token_group is not None:
                first = own_span(self._length, self._token_group.sizes, self._token_group.rank).start
            found = found + self.positions[first : first + length].T
        return found.to(self._compute_dtype)

    def _dry_run(self, tokens: Tensor) -> Tensor:
        self._length = tokens.shape[-1]
        if self.positions is not None and len(self.positions) < self._length:
            raise ValueError(f"{self._length} tokens have only {len(self.positions)} positions")
        return tokens.new_empty((*tokens.shape[:2], self._local_channels, self._length), dtype=self._compute_dtype)


def own_vocabulary(vocab_size: int, group: Group) -> range:
    """This rank's part of a vocabulary. Raises ValueError for one smaller than the number of ranks."""
    if vocab_size < group.size:
        raise ValueError(f"a vocabulary of {vocab_size} is smaller than --tensor-model-parallel-size {group.size}")
    return own_span(vocab_size, [group.size], group.rank)


def among_own(ids: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """Rows of own tokens, 0 for others; and 1 for own tokens, 0 for others, `[n, 1]`."""
    is_own = (ids >= own.start) & (ids < own.stop)
    return (ids - own.start) * is_own, is_own.unsqueeze(1)


class _Lookup(Function):
    """Rows of the own vocabulary's tokens, summed over ranks: `[n]` -> `[n, C/size]`."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        weight: Tensor,
        anchor: Tensor | None,
        queue_gradient: QueueGradient | None,
        own: range,
        group: Group,
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.queue_gradient = queue_gradient
        ctx.own = own
        ctx.group = group
        if group.size == 1:
            return F.embedding(ids, weight)
        rows, is_own = among_own(ids, own)
        # Each token is on one rank, and the others add zeros: the sum has the bits of its row.
        return cached_collective(lambda: sum_and_scatter_columns(F.embedding(rows, weight) * is_own, group)())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        if ctx.queue_gradient is not None:
            whole, _ = gather_columns(grad.contiguous(), ctx.group, Content.DENSE)
            ctx.queue_gradient(partial(_add_rows, ids, whole, ctx.own, ctx.group.size == 1))
        return None, None, None, None, None, None


def _add_rows(ids: Tensor, grad: Tensor, own: range, has_all: bool, total: Tensor) -> None:
    rows = ids
    if not has_all:
        rows, is_own = among_own(ids, own)
        grad = grad * is_own
    total.index_add_(0, rows, grad.to(total.dtype))
