"""Outputs and gradients of weights of a convolution of spikes or counts on a CPU, in time that grows with the spikes.

Where an input is 0 nothing is added to a dense sum, so nothing is computed: what a spike adds is a row of the weight,
or of the gradient of the output.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from megasnn.kernels.codec import pack_where_not_zero
from megasnn.kernels.convolution import Geometry, output_space
from megasnn.kernels.layout import empty_strided
from megasnn.kernels.packed import bits_of
from megasnn.kernels.runtime import run

MOST = 0.4
"""The share of values other than 0 up to which sums take less time than dense products."""
TYPES = torch.float32, torch.float64
_PIXELS = 256  # that are listed at once
_CACHE = 640 * 2**10  # bytes of a weight that are read again and again: most of an L2 cache


@dataclass(frozen=True)
class Spikes:
    """Where an input is not 0.

    Attributes:
        shape: of the input, `[frames, C, H, W]`.
        bits: `[pixels, C / 8]`, as `megasnn.kernels.codec` packs spikes, channels last.
        values: of the input, `[pixels, C]`; `[0, C]` where all that are not 0 are 1.
    """

    shape: torch.Size
    bits: np.ndarray
    values: np.ndarray


def spikes_in(x: Tensor) -> Spikes | None:
    """Of an input `[frames, C, H, W]`; None where products of it are formed as dense ones."""
    rows = x.detach().movedim(1, -1)
    if not _takes(x, x.shape, x.dtype) or not rows.is_contiguous():
        return None
    values, packed = rows.reshape(-1, x.shape[1]).numpy(), bits_of(x)
    if packed is not None:
        return spikes_in_bits(packed, x.shape, x.dtype)
    packed, all_one = pack_where_not_zero(rows)
    return _few(packed, x.shape, values[:0] if all_one else values)


def spikes_in_bits(packed: Tensor, shape: torch.Size, dtype: torch.dtype) -> Spikes | None:
    """The same of spikes that are packed, and that would otherwise be unpacked in this type."""
    if not _takes(packed, shape, dtype):
        return None
    return _few(packed, shape, torch.empty(0, shape[1], dtype=dtype).numpy())


def _takes(memory: Tensor, shape: torch.Size, dtype: torch.dtype) -> bool:
    fits = memory.device.type == "cpu" and dtype in TYPES and shape[1] % 8 == 0 and shape.numel() > 0
    return fits and _loops() is not None


def _few(packed: Tensor, shape: torch.Size, values: np.ndarray) -> Spikes | None:
    bits = packed.numpy()
    if int(np.bitwise_count(bits).sum()) > MOST * shape.numel():
        return None
    return Spikes(shape, bits.reshape(-1, shape[1] // 8), values)


def output(spikes: Spikes, weight: Tensor, geometry: Geometry) -> Tensor | None:
    """Of spikes and `[out, C, k, k]`: `[frames, out, H', W']`, channels last; None where there are no loops for it."""
    loops, columns = _loops_for(weight, geometry), len(weight)
    if loops is None:
        return None
    frames, space = spikes.shape[0], output_space(spikes.shape[2:], weight.shape[2:], geometry)
    parts, sizes = _parts(frames, spikes.shape[2:], space, weight, geometry)
    out = empty_strided((frames * space.numel(), columns), (columns, 1), weight.dtype, weight.device)
    row = spikes.shape[1] * weight.element_size()  # bytes of a column of the weight at one place of the kernel
    cuts = _cuts(columns, weight.element_size(), _CACHE // row)
    taps = max(1, _CACHE // (row * int(cuts[0, 1]) * loops.HALF_LINE // weight.element_size()))
    lines = max(1, _PIXELS // sizes[3])
    arrays = spikes.bits, spikes.values, _by_place(weight).numpy(), out.numpy()
    run(loops.outputs, parts * -(-sizes[2] // lines), *arrays, cuts, sizes, _numbers(weight, geometry), lines, taps)
    return out.view(frames, *space, columns).movedim(-1, 1)


def add_weight_gradient(total: Tensor, grad: Tensor, spikes: Spikes, geometry: Geometry) -> bool:
    """total += the gradient of the weight; False, and nothing is done, where there are no loops for it.

    Args: total, grad: as of `megasnn.kernels.convolution.add_weight_gradient`.
    """
    loops, columns = _loops_for(total, geometry), len(total)
    if loops is None or geometry.stride != (1, 1) or total.dtype != grad.dtype:
        return False
    _, sizes = _parts(spikes.shape[0], spikes.shape[2:], grad.shape[2:], total, geometry)
    by_place = total.new_zeros(total[0].numel(), columns)
    cuts = _cuts(columns, total.element_size(), -(-columns // torch.get_num_threads()))
    lines = max(1, _PIXELS // sizes[1])
    gradients = grad.movedim(1, -1).reshape(-1, columns)
    arrays = spikes.bits, spikes.values, gradients.numpy(), by_place.numpy()
    run(loops.weight_gradients, len(cuts), *arrays, cuts, sizes, _numbers(total, geometry), lines)
    total += by_place.t().contiguous().view(columns, *total.shape[2:], total.shape[1]).movedim(-1, 1)
    return True


@functools.cache
def _loops() -> ModuleType | None:
    try:
        from megasnn.kernels.sparse import loops
    except ImportError:  # no numba for this machine
        return None
    return loops


def _loops_for(weight: Tensor, geometry: Geometry) -> ModuleType | None:
    return _loops() if weight.dtype in TYPES and geometry.groups == 1 and len(weight) % 8 == 0 else None


def _parts(
    frames: int, space: torch.Size, output_space: torch.Size, weight: Tensor, geometry: Geometry
) -> tuple[int, tuple[int, int, int, int]]:
    """How many frames there are, and their height and width and those of the output: all pixels are one column where
    each is by itself."""
    if weight.shape[2:] == (1, 1) and geometry == Geometry():
        pixels = frames * space.numel()
        return 1, (pixels, 1, pixels, 1)
    return frames, (space[0], space[1], output_space[0], output_space[1])


def _numbers(weight: Tensor, geometry: Geometry) -> tuple[int, ...]:
    """A geometry as the loops take it."""
    return *weight.shape[2:], *geometry.stride, *geometry.padding, *geometry.dilation


def _by_place(weight: Tensor) -> Tensor:
    """`[out, C, k, k]` -> `[k k C, out]`."""
    return weight.detach().movedim(1, -1).reshape(len(weight), -1).t().contiguous()


def _cuts(columns: int, itemsize: int, most: int) -> np.ndarray:
    """Blocks of at most so many columns, as few as can be: the first column of each, and how many half lines of the
    cache it has. `[blocks, 2]`."""
    from megasnn.kernels.sparse.loops import BLOCKS, HALF_LINE

    each = HALF_LINE // itemsize
    found, column = [], 0
    while column < columns:
        halves = next(block for block in BLOCKS if block == 1 or block * each <= min(columns - column, most))
        found.append((column, halves))
        column += halves * each
    return np.array(found)
