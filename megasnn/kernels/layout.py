"""Memory order, memory for large new tensors, and TF32 rounding in products.

TF32 has float32's exponents and 11 significant bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megasnn.common.memory import counted_array

_ALIGNMENT = 64  # bytes, the same as in torch's allocator
TF32_CAPABILITY = (8, 0)
"""The first compute capability whose tensor cores take TF32."""
# Modules whose settings are unknown to type checkers.
CUDNN: Any = torch.backends.cudnn
CUBLAS: Any = torch.backends.cuda.matmul
OPERATIONS = (CUDNN.conv, CUDNN.rnn, CUBLAS)


def flat_in_memory(x: Tensor) -> Tensor:
    """A view in memory order; a row-major copy if the tensor is not dense."""
    if x.is_contiguous():
        return x.view(-1)
    # From the slowest dimension to the fastest. Dimensions of size 1 may have any stride, and come first.
    strides = x.stride()
    ordered = x.permute(sorted(range(x.ndim), key=lambda dim: (x.shape[dim] != 1, -strides[dim], dim)))
    return ordered.view(-1) if ordered.is_contiguous() else x.reshape(-1)


def channels_last(x: Tensor) -> Tensor:
    """`[T, N, C, ...]` with the channels fastest in memory, a copy where needed."""
    return x.movedim(2, -1).contiguous().movedim(-1, 2)


def is_channels_last(x: Tensor) -> bool:
    """Whether channels of `[T, N, C, ...]` are adjacent in memory; without space: contiguous."""
    return (x.movedim(2, -1) if x.ndim > 3 else x).is_contiguous()


def to_channels_last(y: Tensor) -> Tensor:
    """A layer's output, and later its gradient, with channels last in memory. Usually no copy."""
    y = _in_order(y)
    if y.requires_grad and y.grad_fn is not None:
        y.register_hook(lambda gradient: None if gradient is None else _in_order(gradient))
    return y


def _in_order(x: Tensor) -> Tensor:
    has_space = x.ndim > 3
    ordered = x.movedim(2, -1) if has_space else x
    if ordered.is_contiguous():
        return x
    # A repeated value (stride 0) has one address for many indices, so it has no order to change.
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        return x
    copy = ordered.contiguous()
    return copy.movedim(-1, 2) if has_space else copy


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    # On the CPU numpy asks for huge pages: touching a large tensor for the first time costs several times less than
    # with torch's allocator.
    if device.type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    memory = empty_array((math.prod(shape) * dtype.itemsize,), np.dtype(np.uint8))
    return torch.from_numpy(memory).view(dtype).view(tuple(shape))


def empty_array(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Uninitialised, aligned to 64 bytes."""
    size = math.prod(shape) * dtype.itemsize
    raw = counted_array(np.empty(size + _ALIGNMENT, np.uint8))
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def takes_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= TF32_CAPABILITY


def on_gpu(values: Tensor) -> bool:
    return values.is_cuda


def let_products_round(allowed: bool) -> None:
    """Allows or forbids TF32 in float32 products, for the whole process."""
    # By default torch rounds in convolutions (cuDNN) and not in matrix products (cuBLAS). Both are set alike.
    # torch.compile reads the first two settings, and fails where they contradict the others.
    CUDNN.allow_tf32 = CUBLAS.allow_tf32 = allowed
    for operation in OPERATIONS:
        operation.fp32_precision = "tf32" if allowed else "ieee"
