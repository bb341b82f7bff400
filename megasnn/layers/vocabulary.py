"""Output layer of language models, divided by vocabulary, with the cross-entropy of the next token.

No rank holds logits of all tokens at once, or of the whole vocabulary: `[tokens, vocab_size / size]` is computed in
chunks of tokens, in forward and again in backward. Ranks exchange three numbers for each token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.common.autograd import Function
from megasnn.common.recompute import cached_collective
from megasnn.kernels.spike_codec import Content
from megasnn.kernels.torch_backend import REDUCED, computed_in
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.embedding import among_own, own_vocabulary
from megasnn.layers.init import trunc_normal
from megasnn.layers.tensors import declare
from megasnn.layers.weight_grad import CastWeights, QueueGradient, add_product
from megasnn.parallel.collectives import (
    all_gather_into,
    all_reduce_sum,
    gather_columns,
    sum_and_scatter_columns,
    to_matrix,
)
from megasnn.parallel.sharding import Initialiser
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import Group

CHUNK_VALUES = 1 << 22
"""Logits that exist at once on a rank: 16 MB in float32."""


class NextTokenLoss(nn.Module):
    """Logits of the next token and their cross-entropy, from the stream `[T, N, C_local, L]`.

    Logits are W times the stream's mean over time, which is the mean over time of W times the stream.

    Returns a dict:
        loss: `[1, N]`, the mean over a sample's tokens. Of ranks that divide tokens, each has its own tokens' part.
        top1: `[1, N]`, the share of tokens whose next token has the highest logit; likewise.
        logits: `[1, N, vocab_size]` after the last token.

    With targets `[1, N, L]`, the next tokens, `logits` is nan. Without targets (a prediction), `loss` and `top1` are
    nan.

    Args:
        channels: C, global.
        initialise: fills the global weight.
    Raises:
        ValueError: a vocabulary smaller than the number of ranks; in the dry run, another number of channels.
    """

    cut_inputs = (True, False)  # own channels of the stream, and all targets
    mixes_tokens = False
    weight: Tensor

    def __init__(
        self,
        channels: int,
        vocab_size: int,
        context: BuildContext | None = None,
        *,
        initialise: Initialiser = trunc_normal,
    ) -> None:
        super().__init__()
        context = context_for(context)
        self.channels = channels
        self.vocab_size = vocab_size
        self._group = context.tp
        self._own = own_vocabulary(vocab_size, context.tp)
        self._compute_dtype = context.numerics.compute_dtype
        self._cast_weights: CastWeights = context.cast_weights
        self._weight_gradients = context.weight_gradients
        self._token_group = context.token_group
        self._length = 0  # of whole sequences
        shard = context.shard((vocab_size, channels), 0, even=False, initialise=initialise)
        declare(self, "weight", shard, context.dtype)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        samples, channels, length = x.shape[1:]
        dtype = computed_in(x)
        if x.is_meta:
            if channels * self._group.size != self.channels:
                raise ValueError(f"an output layer takes {self.channels} channels, got {channels * self._group.size}")
            self._length = length
            one_each = x.new_empty((1, samples), dtype=dtype)
            logits = one_each.new_empty((1, samples, self.vocab_size))
            return {"loss": one_each, "top1": one_each.clone(), "logits": logits}
        unknown = x.new_full((1, 1), torch.nan, dtype=dtype)
        if targets is None:
            unknown_each = unknown.expand(1, samples)
            return {"loss": unknown_each, "top1": unknown_each, "logits": self._last_logits(x).to(dtype).unsqueeze(0)}
        kernel = self._cast_weights.cast(self.weight, self._compute_dtype)
        anchor, queue_gradient = self._weight_gradients.outside_autograd(self.weight)
        rows = to_matrix(x.mean(0, keepdim=True))
        losses, hits = _CrossEntropy.apply(
            rows, kernel, anchor, queue_gradient, targets.reshape(-1), self._own, self._group
        )
        # A rank with a part of the tokens divides by all of them: the ranks' parts add up to the mean.
        whole_length = length if self._token_group is None else self._length
        return {
            "loss": losses.view(1, samples, length).sum(2) / whole_length,
            "top1": hits.view(1, samples, length).sum(2) / whole_length,
            "logits": unknown.expand(1, samples, self.vocab_size),
        }

    def _last_logits(self, x: Tensor) -> Tensor:
        """`[N, vocab_size]` after the last token; of ranks that divide tokens, zeros on all but the last."""
        if self._token_group is not None and self._token_group.rank < self._token_group.size - 1:
            return x.new_zeros((x.shape[1], self.vocab_size))
        # Predictions need no gradients.
        rows, _ = gather_columns(x.detach()[..., -1].mean(0), self._group, Content.DENSE)
        logits = rows @ self.weight.detach().to(rows.dtype).T
        if self._group.size == 1:
            return logits
        whole = logits.new_zeros((len(logits), self.vocab_size))
        whole[:, self._own.start : self._own.stop] = logits
        return all_reduce_sum(whole, self._group)


class _CrossEntropy(Function):
    """Rows' cross-entropy, and whether their targets have the highest logits: `[R, C/size]` -> `[R]`.

    `kernel` is the weight in the products' type.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        kernel: Tensor,
        anchor: Tensor | None,
        queue_gradient: QueueGradient | None,
        targets: Tensor,
        own: range,
        group: Group,
    ) -> tuple[Tensor, Tensor]:
        whole, _ = gather_columns(rows, group, Content.DENSE)
        # A recomputed forward takes the first one's three numbers for each token, not the product again.
        statistics = cached_collective(partial(_row_statistics, _Logits(whole, kernel, targets, own), group))
        largest, sums, target_logit = statistics.unbind(1)
        normaliser = largest + sums.log()
        ctx.group = group
        ctx.own = own
        ctx.queue_gradient = queue_gradient
        ctx.save_for_backward(whole, kernel, targets, normaliser)
        hits = (target_logit >= largest).to(normaliser.dtype)
        ctx.mark_non_differentiable(hits)
        return normaliser - target_logit, hits

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        whole, kernel, targets, normaliser = ctx.saved_tensors
        logits = _Logits(whole, kernel, targets, ctx.own)
        grad_rows = torch.empty_like(whole)
        grad_weight = None
        for chunk in logits:
            span = chunk.span
            # The gradient of the logits takes their memory.
            grad_logits = chunk.logits.sub_(normaliser[span].unsqueeze(1)).exp_()
            grad_logits.scatter_add_(1, chunk.columns, -chunk.is_own.to(grad_logits.dtype))
            grad_logits *= grad[span].unsqueeze(1)
            narrow = grad_logits.to(kernel.dtype)
            torch.matmul(narrow, kernel, out=grad_rows[span])
            if ctx.queue_gradient is None:
                continue
            if logits.is_one_chunk:
                ctx.queue_gradient(partial(add_product, narrow, whole))
            else:
                # Deferring every chunk would keep the logits of all tokens alive: the chunks are summed now and only
                # the sum is deferred.
                if grad_weight is None:
                    grad_weight = kernel.new_zeros(kernel.shape, dtype=normaliser.dtype)
                add_product(narrow, whole[span], grad_weight)
        finish = sum_and_scatter_columns(grad_rows, ctx.group)
        if grad_weight is not None:
            ctx.queue_gradient(partial(_add, grad_weight))
        return finish(), None, None, None, None, None, None


def _add(gradient: Tensor, total: Tensor) -> None:
    total += gradient


@dataclass(frozen=True)
class _Chunk:
    """Logits of some tokens.

    Attributes:
        logits: for this rank's vocabulary, `[n, vocab_size / size]`, in float32 or wider.
        columns: the targets' columns `[n, 1]`; 0 for a token of another rank.
        is_own: 1 for targets in this rank's vocabulary, `[n, 1]`.
    """

    span: slice
    logits: Tensor
    columns: Tensor
    is_own: Tensor


@dataclass(frozen=True)
class _Logits:
    """A rank's logits, chunk by chunk.

    Attributes:
        whole: rows of all channels, `[R, C]`.
        own: this rank's part of the vocabulary.
    """

    whole: Tensor
    kernel: Tensor
    targets: Tensor
    own: range

    @property
    def chunk_rows(self) -> int:
        return max(CHUNK_VALUES // len(self.own), 1)

    @property
    def is_one_chunk(self) -> bool:
        return len(self.whole) <= self.chunk_rows

    def __iter__(self) -> Iterator[_Chunk]:
        for start in range(0, len(self.whole), self.chunk_rows):
            span = slice(start, start + self.chunk_rows)
            logits = self.whole[span] @ self.kernel.T
            if logits.dtype in REDUCED:
                logits = logits.float()
            columns, is_own = among_own(self.targets[span], self.own)
            yield _Chunk(span, logits, columns.unsqueeze(1), is_own)


def _row_statistics(logits: _Logits, group: Group) -> Tensor:
    """For each row the largest logit m, the sum of exp(logit - m), and the target's logit, `[R, 3]`.

    Writes over the logits of each chunk.
    """
    found = []
    for chunk in logits:
        largest = chunk.logits.amax(1, keepdim=True)
        target_logit = chunk.logits.gather(1, chunk.columns) * chunk.is_own
        sums = chunk.logits.sub_(largest).exp_().sum(1, keepdim=True)
        found.append(torch.cat([largest, sums, target_logit], dim=1))
    mine = torch.cat(found)
    if group.size == 1:
        return mine
    traffic.record(group.name, "all-gather", (group.size - 1) * mine.nbytes)
    gathered = all_gather_into(mine.new_empty(group.size * mine.numel()), mine.flatten(), group)
    # Added in rank order, so that all ranks have the same bits.
    largest, sums, target_logit = torch.stack(gathered).view(group.size, -1, 3).unbind(2)
    joint = largest.amax(0)
    return torch.stack([joint, (sums * (largest - joint).exp()).sum(0), target_logit.sum(0)], dim=1)
