"""Exact small formats: a tensor's known content decides how it travels and is stashed.

A spike, 0 or 1, takes one bit. A ternary spike, -1, 0 or 1, takes two. A small count, as in Spikformer's residual
stream, takes one byte. Everything else (images, averages, gradients) is dense. A value that does not fit raises;
nothing is truncated.

Packed values are flat, in their tensor's memory order. numpy packs on the CPU, Triton kernels on a GPU, and plain
tensor operations elsewhere, with equal results.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import cache, partial
from importlib import import_module
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from megasnn.common.checks import check_value, explained
from megasnn.common.memory import counted_array
from megasnn.kernels.layout import flat_in_memory
from megasnn.kernels.triton.available import MOST_VALUES, usable_on


class Content(Enum):
    """A tensor's content: anything; 0 and 1; -1, 0 and 1; or whole numbers from 0 to 255."""

    DENSE = "dense"
    SPIKES = "spikes"
    TERNARY = "ternary"
    COUNTS = "counts"

    @property
    def is_bits(self) -> bool:
        """Whether a value takes less than a byte. Such values may be stored packed beside their tensor."""
        return self in (Content.SPIKES, Content.TERNARY)


DENSE, SPIKES, TERNARY, COUNTS = Content


def content_of_both(one: Content, other: Content) -> Content:
    """The narrowest content that includes two."""
    if one is other or other is Content.SPIKES:
        return one
    return other if one is Content.SPIKES else Content.DENSE


def may_be_sparse(content: Content, pool: int = 1) -> bool:
    """True for spikes, ternary spikes, counts, or their averages over 2, 4, ... pixels square."""
    if content is Content.DENSE:
        return False
    largest = 255 if content is Content.COUNTS else 1
    # TF32 holds values of up to 11 bits exactly.
    return pool & (pool - 1) == 0 and largest * pool**2 <= 2**11


def encode(flat: Tensor, content: Content, check: bool = False) -> Tensor:
    """Packs a contiguous 1-d tensor.

    Returns uint8 [ceil(n/8)] for SPIKES, [2 ceil(n/8)] for TERNARY, [n] for COUNTS, the tensor itself for DENSE.

    Raises:
        ValueError: with `check`, a value that the format cannot hold exactly. Inside a step it is noted
            (megasnn/common/checks.py).
    """
    if flat.is_meta:
        return encoded_like(flat.numel(), content, flat.dtype, flat.device)
    if content is Content.DENSE:
        return flat
    pack = _PACKERS[content]
    if not check:
        return pack(flat)
    with _EXPLAINED[content]:
        return pack(flat, check)


def _explain_content(content: Content, text: str) -> str:
    return (
        f"{text}; the layers before declared {content.value}. Your own neuron declares other values by "
        "SpikingNeuron(..., largest=..., lowest=...), and your own forward by mark_spikes(..., largest, lowest)"
    )


_EXPLAINED = {content: explained(partial(_explain_content, content)) for content in Content}


def encoded_like(count: int, content: Content, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty buffer for `count` encoded values."""
    if content is Content.DENSE:
        return torch.empty(count, dtype=dtype, device=device)
    size = count if content is Content.COUNTS else packed_size(count)
    if content is Content.TERNARY:
        size *= 2
    return torch.empty(size, dtype=torch.uint8, device=device)


def decode_into(payload: Tensor, content: Content, rows: Tensor) -> None:
    """Unpacks into a 2-d tensor with unit column stride: a dense [R, C], or some columns of a wider one."""
    if content is Content.SPIKES:
        unpack_bits_into(payload, rows)
    elif content is Content.TERNARY:
        unpack_ternary_into(payload, rows)
    else:
        rows.copy_(payload.view(rows.shape))


def wants_bits(x: Tensor) -> bool:
    """True if neurons with the input `[T, N, C, ...]` also give their spikes as bits."""
    # A backward needs them, and they cost next to nothing while the spikes are at hand.
    return torch.is_grad_enabled() and x.ndim > 2 and not torch.compiler.is_exporting()


def remember_bits(spikes: Tensor, bits: Tensor | None, content: Content = Content.SPIKES) -> Tensor:
    """Stores packed spikes with the spikes, valid until torch changes them in place.

    Args:
        bits: the result of `pack_bits` for SPIKES, of `pack_ternary` for TERNARY.
    """
    # In `torch.inference_mode` torch does not count such changes, so nothing is stored. Neither does a receive of
    # torch.distributed raise the version (findings/gloo_version_counter.sh): messages arrive in new tensors only.
    if bits is not None and not spikes.is_inference():
        spikes._bits = bits, content, spikes._version  # type: ignore[attr-defined]
    return spikes


def bits_of(x: Tensor, content: Content = Content.SPIKES) -> Tensor | None:
    """Packed spikes of this content, as `remember_bits` stored them; None for all other tensors."""
    bits, stored, version = getattr(x, "_bits", (None, content, 0))
    if bits is None or x.is_inference():
        # A copy made in `torch.inference_mode` takes the stored bits along.
        return None
    return bits if stored is content and x._version == version else None


def share_bits(original: Tensor, copy: Tensor, own_memory: bool = False) -> Tensor:
    """Stores the original's packed spikes, if any, with a tensor of equal values; returns that."""
    for content in (Content.SPIKES, Content.TERNARY):
        bits = bits_of(original, content)
        if bits is not None and own_memory:
            bits = bits.clone()
        if bits is not None:
            return remember_bits(copy, bits, content)
    return copy


def packed_size(numel: int) -> int:
    """Bytes for ``numel`` spikes."""
    return -(-numel // 8)


def pack_bits(x: Tensor, check: bool = False) -> Tensor:
    """Packs spikes, 0 or 1 in any dtype, as uint8 ``[ceil(numel / 8)]``.

    The first spike is the first byte's lowest bit; the last byte is filled up with zero bits. A tensor that is not
    dense is packed in row-major order.

    Raises:
        ValueError: with ``check``, a value is neither 0 nor 1 (-0 is neither); inside a step it is noted
            (megasnn/common/checks.py). Without ``check`` every nonzero value is a spike.
    """
    flat = flat_in_memory(x.detach())
    gpu_codec = _gpu_codec(flat)
    strange: Tensor | bool | None = None
    if gpu_codec is not None:
        packed, strange = gpu_codec.launch_pack_bits(flat, check)
    elif _by_numpy(flat):
        packed, differs = _pack_bits_by_numpy(flat)
        strange = check and differs()
    else:
        packed = _pack_bits_plain(flat)
        if check:
            strange = ~(((flat == 0) | (flat == 1)) & ~torch.signbit(flat)).all()
    if check and strange is not None:
        check_value(strange, "pack_bits takes 0 and 1", partial(_span, flat))
    return packed


def pack_where_not_zero(x: Tensor) -> tuple[Tensor, bool]:
    """Packs a CPU tensor's nonzero positions; the second result: all nonzero values are 1."""
    flat = flat_in_memory(x.detach())
    if _by_numpy(flat):
        packed, differs = _pack_bits_by_numpy(flat)
        return packed, not differs()
    return _pack_bits_plain(flat), bool(((flat == 0) | (flat == 1)).all())


def unpack_bits_into(packed: Tensor, out: Tensor) -> None:
    """Writes ``rows * columns`` bits, row after row, into ``out [rows, columns]``, maybe a strided view.

    Raises:
        ValueError: ``packed`` does not have ``ceil(rows * columns / 8)`` bytes.
    """
    if packed.numel() != -(-out.numel() // 8):
        raise ValueError(f"{out.numel()} spikes take {packed_size(out.numel())} bytes, got {packed.numel()}")
    gpu_codec = _gpu_codec(out)
    if gpu_codec is not None and (out.shape[1] <= 1 or out.stride(1) == 1):
        gpu_codec.launch_unpack_bits(packed, out)
    elif _by_numpy(packed):
        bits = counted_array(np.unpackbits(packed.numpy(), count=out.numel(), bitorder="little"))
        out.copy_(torch.from_numpy(bits).view(out.shape))
    else:
        out.copy_(_unpack_bits_plain(packed, out.numel()).view(out.shape))


def pack_ternary(x: Tensor, check: bool = False) -> Tensor:
    """Packs -1, 0 and 1 in any signed dtype, as uint8 ``[2 * ceil(numel / 8)]``.

    Two halves as from `pack_bits`: the places of 1, then the places of -1.

    Raises:
        ValueError: with ``check``, another value (-0 is one: it would come back as 0); inside a step it is noted.
            Without ``check`` a positive value is packed as 1 and a negative one as -1.
    """
    flat = flat_in_memory(x.detach())
    gpu_codec = _gpu_codec(flat)
    strange: Tensor | bool | None = None
    if gpu_codec is not None:
        packed, strange = gpu_codec.launch_pack_ternary(flat, check)
    elif _by_numpy(flat):
        values = _values(flat)
        above = counted_array(values > 0)
        below = counted_array(values < 0)
        halves = [np.packbits(above, bitorder="little"), np.packbits(below, bitorder="little")]
        packed = torch.from_numpy(counted_array(np.concatenate(halves)))
        strange = check and _differ(above.view(np.int8) - below.view(np.int8), values)
    else:
        packed = torch.cat([_pack_bits_plain(flat > 0), _pack_bits_plain(flat < 0)])
        if check:
            is_zero = (flat == 0) & ~torch.signbit(flat)
            is_one = (flat == 1) | ((flat < 0) & (flat == -1))
            strange = ~(is_zero | is_one).all()
    if check and strange is not None:
        check_value(strange, "pack_ternary takes -1, 0 and 1", partial(_span, flat))
    return packed


def unpack_ternary_into(packed: Tensor, out: Tensor) -> None:
    """Writes ``rows * columns`` values, row after row, into ``out [rows, columns]``, maybe a strided view.

    Raises:
        ValueError: ``packed`` does not have ``2 * ceil(rows * columns / 8)`` bytes.
    """
    half = packed_size(out.numel())
    if packed.numel() != 2 * half:
        raise ValueError(f"{out.numel()} ternary spikes take {2 * half} bytes, got {packed.numel()}")
    halves = packed.view(2, half)
    gpu_codec = _gpu_codec(out)
    if gpu_codec is not None and (out.shape[1] <= 1 or out.stride(1) == 1):
        gpu_codec.launch_unpack_ternary(packed, out)
    elif _by_numpy(packed):
        bits = np.unpackbits(halves.numpy(), axis=1, count=out.numel(), bitorder="little").view(np.int8)
        out.copy_(torch.from_numpy(counted_array(bits[0] - bits[1])).view(out.shape))
    else:
        above = _unpack_bits_plain(halves[0], out.numel()).to(torch.int8)
        below = _unpack_bits_plain(halves[1], out.numel()).to(torch.int8)
        out.copy_((above - below).view(out.shape))


def pack_counts(x: Tensor, check: bool = False) -> Tensor:
    """Packs integers 0 to 255, in any dtype, as uint8 ``[numel]`` in memory order.

    Raises:
        ValueError: with ``check``, a value is not an integer from 0 to 255 (-0 is not); inside a step it is noted.
            Without ``check`` the result for such a value is undefined.
    """
    flat = flat_in_memory(x.detach())
    gpu_codec = _gpu_codec(flat)
    strange: Tensor | bool | None = None
    if gpu_codec is not None:
        packed, strange = gpu_codec.launch_pack_counts(flat, check)
    elif _by_numpy(flat):
        values = _values(flat)
        with np.errstate(invalid="ignore"):
            counts = counted_array(values.astype(np.uint8))
        packed = torch.from_numpy(counts)
        strange = check and _differ(counts, values)
    else:
        packed = flat.to(torch.uint8)
        if check:
            fits = (packed.to(torch.float64) == flat.to(torch.float64)) & ~torch.signbit(flat)
            strange = ~fits.all()
    if check and strange is not None:
        check_value(strange, "pack_counts takes integers from 0 to 255", partial(_span, flat))
    return packed


_PACKERS = {Content.SPIKES: pack_bits, Content.TERNARY: pack_ternary, Content.COUNTS: pack_counts}


def _span(flat: Tensor) -> str:
    return f"got values from {flat.min().item()} to {flat.max().item()}"


def _pack_bits_plain(flat: Tensor) -> Tensor:
    spikes = (flat != 0).to(torch.uint8)
    spikes = torch.cat([spikes, spikes.new_zeros(-flat.numel() % 8)])
    shifts = torch.arange(8, dtype=torch.uint8, device=flat.device)
    return (spikes.view(-1, 8) << shifts).sum(dim=1, dtype=torch.uint8)


def _unpack_bits_plain(packed: Tensor, numel: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.view(-1, 1) >> shifts) & 1).view(-1)[:numel]


def _by_numpy(x: Tensor) -> bool:
    # numpy packs several times faster than torch on a CPU.
    return x.device.type == "cpu"


def _pack_bits_by_numpy(flat: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """Packed spikes, and a function that returns whether a value is neither 0 nor 1."""
    values = _values(flat)
    spikes = counted_array(values != 0)
    packed = torch.from_numpy(counted_array(np.packbits(spikes, bitorder="little")))
    return packed, lambda: _differ(spikes.view(np.uint8), values)


def _values(flat: Tensor) -> np.ndarray:
    return (flat.float() if flat.dtype == torch.bfloat16 else flat).numpy()


def _differ(narrow: np.ndarray, values: np.ndarray) -> bool:
    """True where `values` are not these whole numbers bit for bit: -0 and NaN are none."""
    bits = f"u{values.itemsize}"
    few = 1024
    for part in (slice(few), slice(few, None)):
        # Most wrong tensors are wrong among their first values.
        if not np.array_equal(narrow[part].astype(values.dtype).view(bits), values[part].view(bits)):
            return True
    return False


def _gpu_codec(values: Tensor) -> ModuleType | None:
    """The module that packs on a GPU; None for values that it does not take."""
    if not usable_on(values.device) or values.numel() > MOST_VALUES:
        return None
    codec = _triton_codec()
    return codec if values.dtype in codec.TYPES else None


@cache
def _triton_codec() -> ModuleType:
    # A late import: a processor needs no Triton.
    return import_module("megasnn.kernels.triton.codec")
