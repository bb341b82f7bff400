"""Memory order of dense tensors: which permutation of the dimensions walks through memory from first to last element."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def memory_order(x: Tensor) -> list[int]:
    """Dimensions of ``x`` from slowest to fastest stride; for a dense tensor ``x.permute(order)`` is contiguous.

    Dimensions of size 1 have no place of their own; they come first.
    """
    return sorted(range(x.ndim), key=lambda dim: (x.shape[dim] != 1, -x.stride(dim), dim))


def is_dense(x: Tensor) -> bool:
    """True where the elements fill one block of memory without gaps or overlap, in whatever order."""
    return x.permute(memory_order(x)).is_contiguous()


def flat_in_memory(x: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order, as a view; a tensor with gaps is copied to row-major order first."""
    ordered = x.permute(memory_order(x))
    return ordered.reshape(-1) if ordered.is_contiguous() else x.reshape(-1)


def channels_last_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense ``[T, N, C, ...]`` tensor whose channels, dim 2, are fastest in memory."""
    order = [dim for dim in range(len(shape)) if dim != 2] + [2]
    strides = [0] * len(shape)
    for place, dim in enumerate(order):
        strides[dim] = math.prod(shape[after] for after in order[place + 1 :])
    return tuple(strides)


def empty_like_order(shape: tuple[int, ...], order: list[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised dense tensor of ``shape`` whose memory order is ``order`` (slowest dimension first)."""
    block = torch.empty([shape[dim] for dim in order], dtype=dtype)
    inverse = [order.index(dim) for dim in range(len(order))]
    return block.permute(inverse)
