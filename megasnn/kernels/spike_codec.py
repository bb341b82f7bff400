"""Exact small formats: what a tensor is known to hold decides how it travels and how it is stashed.

A spike is 0 or 1 and takes one bit. Spikformer's residual stream is a sum of spikes: a small count, one byte. Both are
exact. Everything else (images, averages, gradients) is dense. A value that does not fit raises; nothing is cut.

Packed values are flat in memory order of the tensor that they come from. On the CPU compiled loops pack in one pass
over memory, on a GPU Triton kernels; where they cannot be used plain tensor operations do it, with equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megasnn.device_checks import explained, refuse
from megasnn.kernels.layout import empty_strided, flat_in_memory, is_dense, row_major_strides
from megasnn.kernels.numba import loops_of
from megasnn.kernels.triton.available import MOST_VALUES, usable_on


class Content(Enum):
    """Content of a tensor: anything, zeros and ones, or whole numbers from 0 to 255."""

    DENSE = "dense"
    SPIKES = "spikes"
    COUNTS = "counts"


DENSE, SPIKES, COUNTS = Content


def may_be_sparse(content: Content, pool: int = 1) -> bool:
    """True where a layer may sum over spikes: its input holds spikes or counts, or averages of 2, 4, ... pixels square.

    The bound of 11 bits is that of values that are exact in TF32.
    """
    largest = {Content.DENSE: None, Content.SPIKES: 1, Content.COUNTS: 255}[content]
    return largest is not None and pool & (pool - 1) == 0 and largest * pool**2 <= 2**11


# --- by content


def encode(flat: Tensor, content: Content, check: bool = False) -> Tensor:
    """Packs a contiguous 1-d tensor: uint8 for SPIKES ([ceil(n/8)]) and COUNTS ([n]), itself for DENSE. Of a
    tensor without values (on the meta device), the shape of that.

    Raises:
        ValueError: with `check`, a value that the format cannot hold exactly; inside of a step it is noted
            (megasnn/device_checks.py).
    """
    if flat.is_meta:
        return encoded_like(flat.numel(), content, flat.dtype, flat.device)
    if content is Content.DENSE:
        return flat
    pack = pack_bits if content is Content.SPIKES else pack_counts
    if not check:
        return pack(flat)
    with explained(
        lambda text: (
            f"{text}; what the layers before gave was said to hold {content.value}: a neuron of one's own "
            "that gives other values says so, SpikingNeuron(..., largest=...), a forward mark_spikes(..., largest)"
        )
    ):
        return pack(flat, check)


def encoded_like(
    count: int, content: Content, dtype: torch.dtype, device: torch.device, pinned: bool = False
) -> Tensor:
    """An empty buffer for `count` encoded values; in pinned memory where a GPU will read it from the host's."""
    if content is Content.SPIKES:
        count, dtype = packed_size(count), torch.uint8
    elif content is Content.COUNTS:
        dtype = torch.uint8
    return torch.empty(count, dtype=dtype, device=device, pin_memory=pinned)


def decode_into(payload: Tensor, content: Content, rows: Tensor) -> None:
    """Unpacks into a 2-d tensor of unit column stride: a dense [R, C], or some columns of a wider one."""
    if content is Content.SPIKES:
        unpack_bits_into(payload, rows)
    else:
        rows.copy_(payload.view(rows.shape))


# --- spikes that know their bits


def wants_bits(x: Tensor) -> bool:
    """True where what fires on an input `[T, N, C, ...]` is to give its spikes as bits as well: they cost next to
    nothing while the spikes are at hand, a backward needs them, and layers take them of tensors with channels last."""
    return torch.is_grad_enabled() and x.ndim > 2 and x[0].movedim(1, -1).is_contiguous()


def remember_bits(spikes: Tensor, bits: Tensor | None) -> Tensor:
    """Notes on the spikes what `pack_bits` makes of them, until torch changes them in place.

    Those of `torch.inference_mode` never know: torch does not count their changes.
    """
    if bits is not None and not spikes.is_inference():
        spikes._bits = bits, spikes._version  # type: ignore[attr-defined]
    return spikes


def bits_of(x: Tensor) -> Tensor | None:
    """Bits of spikes that a kernel has packed, as `pack_bits` gives them; None for all other tensors."""
    bits, version = getattr(x, "_bits", (None, 0))
    if bits is None or x.is_inference():  # a copy that is made in `torch.inference_mode` has what was remembered
        return None
    return bits if x._version == version else None


# --- packing


def packed_size(numel: int) -> int:
    """Bytes that ``numel`` spikes take."""
    return -(-numel // 8)


def pack_bits(x: Tensor, check: bool = False) -> Tensor:
    """Packs spikes, 0 or 1 in any dtype, as uint8 ``[ceil(numel / 8)]``.

    The first spike is the lowest bit of the first byte; the last byte is filled up with zero bits. A tensor that is
    not dense is packed in row-major order.

    Raises:
        ValueError: with ``check``, a value is neither 0 nor 1 (-0 is neither); inside of a step it is noted
            (megasnn/device_checks.py). Without it every non-zero value is a spike.
    """
    flat = flat_in_memory(x.detach())
    compiled, on_gpu = _compiled(flat), _on_gpu(flat)
    strange: Tensor | bool | None = None
    if on_gpu is not None:
        packed, strange = on_gpu.pack_bits(flat, check)
    elif compiled is None:
        packed = _pack_bits_plain(flat)
        if check:
            strange = ~(((flat == 0) | (flat == 1)) & ~torch.signbit(flat)).all()
    else:
        packed, strange = _pack_spikes(compiled, flat)
    if check and strange is not None:
        refuse(strange, "pack_bits takes 0 and 1", partial(_span, flat))
    return packed


def pack_where_not_zero(x: Tensor) -> tuple[Tensor, bool]:
    """Packs which values of a tensor on a CPU are not 0, and tells whether all of them are 1."""
    flat = flat_in_memory(x.detach())
    compiled = _compiled(flat)
    if compiled is None:
        return _pack_bits_plain(flat), bool(((flat == 0) | (flat == 1)).all())
    packed, strange = _pack_spikes(compiled, flat)
    return packed, not strange


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

    With ``out`` a block of columns of a channels-last tensor, this puts one rank's channels in their place.

    Raises:
        ValueError: ``out`` is not two-dimensional, or ``packed`` is not uint8 ``[ceil(rows * columns / 8)]``.
    """
    if out.ndim != 2:
        raise ValueError(f"bits are unpacked into rows and columns, got a tensor {tuple(out.shape)}")
    size = packed_size(out.numel())
    if packed.dtype != torch.uint8 or packed.shape != (size,):
        raise ValueError(f"{out.numel()} spikes take uint8 [{size}], got {packed.dtype} {tuple(packed.shape)}")
    columns = out.shape[1]
    compiled, on_gpu = _compiled(packed), _on_gpu(out)
    rows_of_neighbours = columns <= 1 or out.stride(1) == 1
    if on_gpu is not None and rows_of_neighbours:
        on_gpu.unpack_bits_into(packed, out)
    elif compiled is None or out.dtype not in _WRITTEN_AS or not rows_of_neighbours:
        out.copy_(_unpack_bits_plain(packed, out.numel()).view(out.shape))
    elif out.numel():
        _unpack(compiled, packed.numpy(), out)


def empty_values(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for so many values that are unpacked then, ``[count]``: where compiled loops do it, in huge pages."""
    if device.type != "cpu" or _loops() is None:
        return torch.empty(count, dtype=dtype, device=device)
    return empty_strided((count,), (1,), dtype, device)


def pack_counts(x: Tensor, check: bool = False) -> Tensor:
    """Packs integers 0 to 255, in any dtype, as uint8 ``[numel]`` in memory order.

    Raises:
        ValueError: with ``check``, a value is not an integer from 0 to 255 (-0 is not); inside of a step it is noted.
            Without it the result is then undefined.
    """
    flat = flat_in_memory(x.detach())
    compiled, on_gpu = _compiled(flat), _on_gpu(flat)
    strange: Tensor | bool | None = None
    if on_gpu is not None:
        packed, strange = on_gpu.pack_counts(flat, check)
    elif compiled is None:
        packed = flat.to(torch.uint8)
        if check:
            fits = (packed.to(torch.float64) == flat.to(torch.float64)) & ~torch.signbit(flat)
            strange = ~fits.all()
    else:
        packed, values = torch.empty(flat.numel(), dtype=torch.uint8), _readable(flat)
        signed = values.view(f"int{8 * values.itemsize}")
        strange = _pack(compiled, compiled.pack_small, flat.numel(), values, signed, packed.numpy())
    if check and strange is not None:
        refuse(strange, "pack_counts takes integers from 0 to 255", partial(_span, flat))
    return packed


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
    if strides is None:
        strides = row_major_strides(shape)
    plan = torch.empty_strided(tuple(shape), tuple(strides), device="meta") if out is None else out
    if plan.shape != torch.Size(shape) or not is_dense(plan):
        have = f"{tuple(plan.shape)} with strides {plan.stride()}"
        raise ValueError(f"a packed tensor {tuple(shape)} needs a dense one of that shape, got {have}")
    return empty_strided(shape, strides, dtype, device) if out is None else out


def _span(flat: Tensor) -> str:
    return f"got values from {flat.min().item()} to {flat.max().item()}"


# --- the plain codec, which the others must equal


def _pack_bits_plain(flat: Tensor) -> Tensor:
    spikes = (flat != 0).to(torch.uint8)
    spikes = torch.cat([spikes, spikes.new_zeros(-flat.numel() % 8)])
    shifts = torch.arange(8, dtype=torch.uint8, device=flat.device)
    return (spikes.view(-1, 8) << shifts).sum(dim=1, dtype=torch.uint8)


def _unpack_bits_plain(packed: Tensor, numel: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.view(-1, 1) >> shifts) & 1).view(-1)[:numel]


# --- compiled loops and kernels

_WRITTEN_AS = {
    torch.float32: (torch.float32, 1.0),
    torch.float64: (torch.float64, 1.0),
    torch.bfloat16: (torch.int16, 0x3F80),
    torch.float16: (torch.int16, 0x3C00),
}
"""Types that the compiled loops write, each through a type that numpy knows, and how 1 looks in it."""


_loops = partial(loops_of, "codec")


def _compiled(x: Tensor) -> ModuleType | None:
    return _loops() if x.device.type == "cpu" else None


def _on_gpu(values: Tensor) -> ModuleType | None:
    if not usable_on(values.device) or values.numel() > MOST_VALUES:
        return None
    from megasnn.kernels.triton import codec

    return codec if values.dtype in codec.TYPES else None


def _readable(flat: Tensor) -> np.ndarray:
    return (flat if flat.dtype in (torch.float32, torch.float64) else flat.float()).numpy()


def _pack_spikes(compiled: ModuleType, flat: Tensor) -> tuple[Tensor, bool]:
    """Packed spikes, and True where it met a value that the format cannot hold."""
    packed, values = torch.empty(packed_size(flat.numel()), dtype=torch.uint8), _readable(flat)
    bits = values.view(f"uint{8 * values.itemsize}")
    one = np.ones(1, values.dtype).view(bits.dtype)[0]
    magnitude = np.array(np.iinfo(bits.dtype).max >> 1, bits.dtype)[()]
    return packed, _pack(compiled, compiled.pack_spikes, bits.size, bits, packed.numpy(), one, magnitude)


def _pack(compiled: ModuleType, kernel: Callable[..., None], count: int, *arguments: Any) -> bool:
    strangers = np.zeros(-(-count // compiled.UNIT), np.bool_)
    if strangers.size:
        compiled.run(kernel, strangers.size, *arguments, strangers)
    return bool(strangers.any())


def _unpack(compiled: ModuleType, packed: np.ndarray, out: Tensor) -> None:
    rows, columns = out.shape
    stride = columns if rows == 1 else out.stride(0)
    dtype, one = _WRITTEN_AS[out.dtype]
    span = out.view(dtype).as_strided(((rows - 1) * stride + columns,), (1,)).numpy()
    zero, one = span.dtype.type(0), span.dtype.type(one)
    if stride == columns:
        compiled.run(compiled.unpack_spikes, -(-span.size // compiled.UNIT), span, packed, zero, one)
    else:
        compiled.run(compiled.unpack_spike_rows, rows, span, packed, columns, stride, zero, one)
