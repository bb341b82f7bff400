"""Exact small wire formats: spikes as bits, counts as bytes, flat in the memory order of the tensor they come from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megasnn.kernels.layout import flat_in_memory, is_dense

_SHIFTS = tuple(range(8))


def packed_size(numel: int) -> int:
    """Bytes that ``numel`` spikes take."""
    return -(-numel // 8)


def pack_bits(x: Tensor, check: bool = False) -> Tensor:
    """Spikes, 0 or 1 in any dtype, as uint8 ``[ceil(numel / 8)]``; the first spike is the lowest bit of the first byte.

    The last byte is filled with zero bits. A tensor that is not dense is packed in row-major order.

    Raises:
        ValueError: with ``check``, a value is neither 0 nor 1. Without it every non-zero value counts as a spike.
    """
    flat = flat_in_memory(x.detach())
    if check:
        _require(bool(((flat == 0) | (flat == 1)).all()), flat, "0 or 1", "pack_bits")
    spikes = (flat != 0).to(torch.uint8)
    tail = -flat.numel() % 8
    if tail:
        spikes = torch.cat([spikes, spikes.new_zeros(tail)])
    shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=x.device)
    return (spikes.view(-1, 8) << shifts).sum(dim=1, dtype=torch.uint8)


def unpack_bits(
    packed: Tensor,
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """The inverse of :func:`pack_bits`: a dense tensor of ``shape`` with ``strides`` (row-major without), or ``out``.

    Raises:
        ValueError: the number of bytes does not fit the shape, or the strides or ``out`` are not dense.
    """
    out = _target(shape, strides, dtype, out, packed.device)
    unpack_bits_into(packed, flat_in_memory(out).view(1, -1))
    return out


def unpack_bits_into(packed: Tensor, out: Tensor) -> None:
    """Writes ``rows * columns`` bits, row after row, into ``out [rows, columns]``, which may be a strided view.

    With ``out`` a block of columns of a channels-last tensor this puts one rank's channels into the whole tensor.

    Raises:
        ValueError: ``out`` is not two-dimensional, or ``packed`` does not hold ``ceil(rows * columns / 8)`` bytes.
    """
    _check_packed(packed, out)
    shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=packed.device)
    bits = ((packed.view(-1, 1) >> shifts) & 1).view(-1)
    out.copy_(bits[: out.numel()].view(out.shape))


def pack_counts(x: Tensor, check: bool = False) -> Tensor:
    """Integers 0 to 255, in any dtype, as uint8 ``[numel]`` in memory order.

    Raises:
        ValueError: with ``check``, a value is not an integer from 0 to 255.
    """
    flat = flat_in_memory(x.detach())
    if check:
        good = (flat >= 0) & (flat <= 255) & (flat == flat.floor())
        _require(bool(good.all()), flat, "an integer from 0 to 255", "pack_counts")
    return flat.to(torch.uint8)


def unpack_counts(
    packed: Tensor,
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """The inverse of :func:`pack_counts`; arguments and errors as for :func:`unpack_bits`."""
    out = _target(shape, strides, dtype, out, packed.device)
    if packed.dtype != torch.uint8 or packed.numel() != out.numel():
        raise ValueError(f"{packed.numel()} packed values of {packed.dtype} do not fill a tensor {tuple(shape)}")
    flat_in_memory(out).copy_(packed.view(-1))
    return out


def _target(
    shape: Sequence[int],
    strides: Sequence[int] | None,
    dtype: torch.dtype,
    out: Tensor | None,
    device: torch.device,
) -> Tensor:
    if out is None:
        if strides is None:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        out = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)
    if out.shape != torch.Size(shape) or not is_dense(out):
        raise ValueError(f"cannot unpack {tuple(shape)} into a tensor {tuple(out.shape)} with strides {out.stride()}")
    return out


def _check_packed(packed: Tensor, out: Tensor) -> None:
    if out.ndim != 2:
        raise ValueError(f"bits are unpacked into rows and columns, got a tensor {tuple(out.shape)}")
    if packed.dtype != torch.uint8 or packed.ndim != 1 or packed.numel() != packed_size(out.numel()):
        have = f"{packed.dtype} {tuple(packed.shape)}"
        raise ValueError(f"{out.numel()} spikes take uint8 [{packed_size(out.numel())}], got {have}")


def _require(good: bool, flat: Tensor, expected: str, name: str) -> None:
    if not good:
        raise ValueError(f"{name} takes {expected}, got values from {flat.min().item()} to {flat.max().item()}")
