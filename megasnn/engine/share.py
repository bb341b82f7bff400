"""Samples of a global batch that one rank reads, so that no rank decodes all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megasnn.data import BatchShare


@dataclass(frozen=True)
class SampleShare:
    """Samples of a global batch that this rank reads and computes (`Engine.share`).

    Attributes:
        indices: these samples, as the global batch names them, in its order; may be empty in an evaluation.
        samples: size of the global batch.
    """

    indices: list[int]
    samples: int
    evaluates: bool = False


def share_of(batch: Sequence[int] | Tensor, layout: BatchShare, evaluates: bool) -> SampleShare:
    """One rank's part of a global batch of sample numbers.

    Args:
        layout: the rank's part of every global batch.
    Raises:
        ValueError: no samples, or too many for one batch of an evaluation.
    """
    numbers = batch.tolist() if isinstance(batch, Tensor) else list(batch)
    most = layout.global_batch_size
    if not numbers or (evaluates and len(numbers) > most):
        limit = f"1 to {most} (global_batch_size)" if evaluates else "1 or more"
        raise ValueError(f"share a global batch of {limit} samples, not of {len(numbers)}")
    own: list[int] = []
    # The global batch is cut by position, so that any list of numbers gives the same micro-batches on every layout.
    for start, size in layout.spans(len(numbers)):
        own += numbers[start : start + size]
    return SampleShare(own, len(numbers), evaluates)


def share_problem(share: object, trains: bool) -> str:
    """Why a share does not fit the call; empty if it does."""
    if not isinstance(share, SampleShare):
        return f"share must come from engine.share, not be a {type(share).__name__}"
    if share.evaluates == trains:
        wanted = "engine.share(batch)" if trains else "engine.share(batch, evaluates=True)"
        return f"the share is for {'an evaluation' if trains else 'a training step'}: take {wanted}"
    return ""
