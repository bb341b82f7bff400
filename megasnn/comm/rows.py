"""Activations as rows: `[T, N, C, *space]` with channels last in memory is the matrix `[T*N*space, C]`.

Tensor parallelism cuts columns of that matrix, so that every collective below works on rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_rows(x: Tensor) -> Tensor:
    """[T, N, C, *space] -> [T*N*prod(space), C]; a view when channels are last in memory, otherwise a copy."""
    return x.movedim(2, -1).reshape(-1, x.shape[2])


def from_rows(rows: Tensor, like: tuple[int, ...] | torch.Size) -> Tensor:
    """The inverse, for the shape `like` = (T, N, any C, *space); C is taken from the rows. Always a view."""
    time, samples, _, *space = like
    return rows.view(time, samples, *space, rows.shape[1]).movedim(-1, 2)
