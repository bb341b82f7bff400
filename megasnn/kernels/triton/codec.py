"""Packs spikes into one or two bits and counts into bytes, in one pass each.

The kernels must equal the packing of spike_codec.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megasnn.kernels.triton.launch import Launch

_BLOCK = 2048  # values of a program

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int32, torch.int64)
"""Types that the kernels read and write."""


@triton.jit
def below_zero(x):
    """True where the sign bit is set, for -0 too."""
    # By the bits, because a comparison takes -0 for 0.
    if x.dtype == tl.float64:
        below = x.to(tl.int64, bitcast=True) < 0
    elif x.dtype == tl.float32:
        below = x.to(tl.int32, bitcast=True) < 0
    elif x.dtype.is_floating():
        below = x.to(tl.int16, bitcast=True) < 0
    else:
        below = x < 0
    return below


@triton.jit
def pack_bits_kernel(x, packed, strange, size, BLOCK: tl.constexpr):
    """Sets `strange`, if given, where a value is neither 0 nor 1."""
    byte = tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    place = byte[:, None].to(tl.int64) * 8 + tl.arange(0, 8)[None, :]
    value = tl.load(x + place, mask=place < size, other=0)
    bits = (value != 0).to(tl.int32) << tl.arange(0, 8)[None, :]
    tl.store(packed + byte, tl.sum(bits, axis=1).to(tl.uint8), mask=byte * 8 < size)
    if strange is not None:
        odd = ((value != 0) & (value != 1)) | below_zero(value)
        tl.atomic_or(strange, tl.max(tl.max(odd.to(tl.int32), axis=1), axis=0))


@triton.jit
def unpack_bits_kernel(packed, out, size, columns, stride, BLOCK: tl.constexpr):
    """Writes bits into rows with `columns` values; row r begins at `r stride` in `out`."""
    byte = tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    place = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    bits = tl.load(packed + byte, mask=byte * 8 < size, other=0).to(tl.int32)
    value = (bits[:, None] >> tl.arange(0, 8)[None, :]) & 1
    target = out + (place // columns).to(tl.int64) * stride + place % columns
    if out.dtype.element_ty.is_floating():
        # The interpreter converts integers to bfloat16 wrongly.
        value = value.to(tl.float32)
    tl.store(target, value.to(out.dtype.element_ty), mask=place < size)


@triton.jit
def pack_ternary_kernel(x, packed, strange, size, BLOCK: tl.constexpr):
    """Sets `strange`, if given, where a value is none of -1, 0 and 1, or is -0."""
    byte = tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    place = byte[:, None].to(tl.int64) * 8 + tl.arange(0, 8)[None, :]
    value = tl.load(x + place, mask=place < size, other=0)
    has_sign = below_zero(value)
    if value.dtype.is_floating() and value.dtype.primitive_bitwidth == 16:
        value = value.to(tl.float32)  # the interpreter compares bfloat16 wrongly
    above = (value > 0).to(tl.int32) << tl.arange(0, 8)[None, :]
    below = (value < 0).to(tl.int32) << tl.arange(0, 8)[None, :]
    tl.store(packed + byte, tl.sum(above, axis=1).to(tl.uint8), mask=byte * 8 < size)
    tl.store(packed + tl.cdiv(size, 8) + byte, tl.sum(below, axis=1).to(tl.uint8), mask=byte * 8 < size)
    if strange is not None:
        odd = ((value != 0) & (value != 1) & (value != -1)) | ((value == 0) & has_sign)
        tl.atomic_or(strange, tl.max(tl.max(odd.to(tl.int32), axis=1), axis=0))


@triton.jit
def unpack_ternary_kernel(packed, out, size, columns, stride, BLOCK: tl.constexpr):
    """As `unpack_bits_kernel`: the bits of 1 less the bits of -1."""
    byte = tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    place = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    above = tl.load(packed + byte, mask=byte * 8 < size, other=0).to(tl.int32)
    below = tl.load(packed + tl.cdiv(size, 8) + byte, mask=byte * 8 < size, other=0).to(tl.int32)
    value = ((above[:, None] >> tl.arange(0, 8)[None, :]) & 1) - ((below[:, None] >> tl.arange(0, 8)[None, :]) & 1)
    target = out + (place // columns).to(tl.int64) * stride + place % columns
    if out.dtype.element_ty.is_floating():
        # The interpreter converts integers to bfloat16 wrongly.
        value = value.to(tl.float32)
    tl.store(target, value.to(out.dtype.element_ty), mask=place < size)


@triton.jit
def pack_counts_kernel(x, packed, strange, size, BLOCK: tl.constexpr):
    """Sets `strange`, if given, where a value is none of 0, 1 ... 255."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < size, other=0)
    below = below_zero(value)
    if value.dtype.is_floating() and value.dtype.primitive_bitwidth == 16:
        value = value.to(tl.float32)
    fits = (value >= 0) & (value <= 255)
    byte = tl.where(fits, value, 0).to(tl.int32)
    # Values that do not fit are stored as 0, and reported below.
    tl.store(packed + place, byte.to(tl.uint8), mask=place < size)
    if strange is not None:
        odd = (byte.to(value.dtype) != value) | below
        tl.atomic_or(strange, tl.max(odd.to(tl.int32), axis=0))


def launch_pack_bits(flat: Tensor, check: bool) -> tuple[Tensor, Tensor | None]:
    """The bytes, and with `check` an int32, nonzero if a value is no spike. The host does not wait here."""
    packed = flat.new_empty(-(-flat.numel() // 8), dtype=torch.uint8)
    strange = flat.new_zeros(1, dtype=torch.int32) if check else None
    if flat.numel():
        _pack_bits_launch(flat.numel())(flat, packed, strange)
    return packed, strange


def launch_unpack_bits(packed: Tensor, out: Tensor) -> None:
    """Unpacks into `out [rows, columns]`, whose columns are neighbours in memory."""
    rows, columns = out.shape
    stride = columns if rows == 1 else out.stride(0)
    if out.numel():
        _unpack_bits_launch(out.numel(), columns, stride)(packed, out)


def launch_pack_ternary(flat: Tensor, check: bool) -> tuple[Tensor, Tensor | None]:
    """The bytes, and with `check` an int32, nonzero if a value is not ternary."""
    packed = flat.new_empty(2 * -(-flat.numel() // 8), dtype=torch.uint8)
    strange = flat.new_zeros(1, dtype=torch.int32) if check else None
    if flat.numel():
        _pack_ternary_launch(flat.numel())(flat, packed, strange)
    return packed, strange


def launch_unpack_ternary(packed: Tensor, out: Tensor) -> None:
    """As `launch_unpack_bits`."""
    rows, columns = out.shape
    stride = columns if rows == 1 else out.stride(0)
    if out.numel():
        _unpack_ternary_launch(out.numel(), columns, stride)(packed, out)


def launch_pack_counts(flat: Tensor, check: bool) -> tuple[Tensor, Tensor | None]:
    """The bytes, and with `check` an int32, nonzero if a value is no count."""
    packed = flat.new_empty(flat.numel(), dtype=torch.uint8)
    strange = flat.new_zeros(1, dtype=torch.int32) if check else None
    if flat.numel():
        _pack_counts_launch(flat.numel())(flat, packed, strange)
    return packed, strange


def _launches(kernel: Any) -> Callable[..., Launch]:
    """A kernel's launch by its numbers, the first one the number of values."""

    @lru_cache(maxsize=1024)
    def launch(size: int, *numbers: int) -> Launch:
        return Launch(kernel, -(-size // _BLOCK), size, *numbers, BLOCK=_BLOCK)

    return launch


_pack_bits_launch = _launches(pack_bits_kernel)
_pack_ternary_launch = _launches(pack_ternary_kernel)
_pack_counts_launch = _launches(pack_counts_kernel)
_unpack_bits_launch = _launches(unpack_bits_kernel)
_unpack_ternary_launch = _launches(unpack_ternary_kernel)
