"""Causal softmax attention on a CPU, block by block of queries, and its gradients.

torch's kernel for CPUs takes 1.4 times as long at heads of 32 channels (forward and backward, 512 tokens, torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megasnn.layers.attention import sums_type

QUERIES = 64
"""Queries in a block: keys after the block are skipped."""
PROBABILITIES_AT_ONCE = 1 << 18
"""Attention probabilities that are computed together: 1 MB in float32."""

_Group = tuple[slice, slice]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last tokens to all, `[F, heads, tokens, d]`: the last query sees every key.

    Computes in float32 or wider. The result has the heads of a token side by side in memory.
    """
    frames, heads, tokens, width = q.shape
    out = q.new_empty((frames, tokens, heads, width)).transpose(1, 2)
    scale = 1 / math.sqrt(width)
    for group in _groups(heads, k):
        queries = _take(q, group) * scale
        keys = _take(k, group)
        values = _take(v, group)
        group_output = torch.empty_like(queries)
        for span, end in _blocks(tokens, k.shape[2]):
            probabilities = _probabilities(queries[:, span], keys[:, :end])
            torch.bmm(probabilities, values[:, :end], out=group_output[:, span])
        _put(out, group, group_output)
    return out


def attend_gradients(
    inputs: tuple[Tensor, Tensor, Tensor], grad: Tensor, results: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Writes the gradients of q, k and v into tensors of their shapes, of any type and strides.

    Args:
        grad: of the output of `attend`.
    """
    q, k, v = inputs
    tokens = q.shape[2]
    scale = 1 / math.sqrt(q.shape[3])
    for group in _groups(q.shape[1], k):
        queries = _take(q, group) * scale
        keys = _take(k, group)
        values = _take(v, group)
        grad_output = _take(grad, group)
        grad_queries = torch.empty_like(queries)
        grad_keys = torch.zeros_like(keys)
        grad_values = torch.zeros_like(values)
        for span, end in _blocks(tokens, k.shape[2]):
            # Computed again: kept, the probabilities would grow with the square of the number of tokens.
            probabilities = _probabilities(queries[:, span], keys[:, :end])
            grad_values[:, :end].baddbmm_(probabilities.transpose(1, 2), grad_output[:, span])
            grad_probabilities = torch.bmm(grad_output[:, span], values[:, :end].transpose(1, 2))
            grad_scores = torch.ops.aten._softmax_backward_data(
                grad_probabilities, probabilities, -1, probabilities.dtype
            )
            torch.bmm(grad_scores, keys[:, :end], out=grad_queries[:, span])
            grad_keys[:, :end].baddbmm_(grad_scores.transpose(1, 2), queries[:, span])
        for result, gradient in zip(results, (grad_queries.mul_(scale), grad_keys, grad_values), strict=True):
            _put(result, group, gradient)


def _groups(heads: int, k: Tensor) -> Iterator[_Group]:
    """Frames and heads that are computed together."""
    most = max(PROBABILITIES_AT_ONCE // (QUERIES * k.shape[2]), 1)
    frames_each = max(most // heads, 1)
    heads_each = min(most, heads)
    for frame in range(0, len(k), frames_each):
        for head in range(0, heads, heads_each):
            yield slice(frame, frame + frames_each), slice(head, head + heads_each)


def _blocks(tokens: int, keys: int) -> Iterator[tuple[slice, int]]:
    """Blocks of queries, and the number of keys that the last query of each sees."""
    for start in range(0, tokens, QUERIES):
        stop = min(start + QUERIES, tokens)
        yield slice(start, stop), keys - tokens + stop


def _take(x: Tensor, group: _Group) -> Tensor:
    """Heads of all frames `[n, tokens, d]`, contiguous, in float32 or wider."""
    return x[group].flatten(0, 1).to(sums_type(x.dtype)).contiguous()


def _put(result: Tensor, group: _Group, values: Tensor) -> None:
    """Inverse of `_take`."""
    target = result[group]
    target.copy_(values.view(target.shape))


def _probabilities(queries: Tensor, keys: Tensor) -> Tensor:
    """Softmax of the scores `[n, queries, keys]`, of keys up to the last query's."""
    scores = torch.bmm(queries, keys.transpose(1, 2))
    count = queries.shape[1]
    # A sum, which torch vectorises: filling by a mask takes seven times as long.
    scores[:, :, -count:] += scores.new_full((count, count), -math.inf).triu_(1)
    return torch.softmax(scores, -1, out=scores)
