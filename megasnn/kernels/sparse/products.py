"""Outputs and gradients of weights of a convolution of spikes or counts on a CPU, in time that grows with the spikes.

Where an input is 0 nothing is added to a dense sum, so nothing is computed: what a spike adds is a row of the weight,
or of the gradient of the output.
"""

from __future__ import annotations

import functools
import math
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

# From this share on, each row is added so often that it is worth having all of them in an L1 cache: in narrow blocks of
# columns, 64 channels or 64 pixels at a time. Otherwise blocks are wide, and their rows fit in most of an L2 cache.
_MANY = 0.1
_NARROW = 512  # bytes of a block
_L2 = 640 * 2**10  # bytes
_PIXELS, _FEW_PIXELS = 256, 64  # that are listed at once
_LINE = 64  # bytes


@dataclass(frozen=True)
class Spikes:
    """Where an input is not 0.

    Attributes:
        shape: of the input, `[frames, C, H, W]`.
        bits: `[pixels, C / 8]`, as `megasnn.kernels.codec` packs spikes, channels last.
        share: of values that are not 0.
        values: of the input, `[pixels, C]`; `[0, C]` where all that are not 0 are 1.
    """

    shape: torch.Size
    bits: np.ndarray
    share: float
    values: np.ndarray


def spikes_in(x: Tensor) -> Spikes | None:
    """Of an input `[frames, C, H, W]`; None where products of it are formed as dense ones."""
    rows = x.detach().movedim(1, -1)
    if not _takes(x, x.shape, x.dtype) or not rows.is_contiguous():
        return None
    known = bits_of(x)
    if known is not None:
        return spikes_in_bits(known, x.shape, x.dtype)
    packed, all_one = pack_where_not_zero(rows)
    values = rows.reshape(-1, x.shape[1]).numpy()
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
    share = int(np.bitwise_count(bits).sum()) / shape.numel()
    return Spikes(shape, bits.reshape(-1, shape[1] // 8), share, values) if share <= MOST else None


def output(spikes: Spikes, weight: Tensor, geometry: Geometry) -> Tensor | None:
    """Of spikes and `[out, C, k, k]`: `[frames, out, H', W']`, channels last; None where there are no loops for it, and
    where the weight is not finite, which is to be seen also where no spike meets it."""
    loops, columns = _loops_for(weight, geometry), len(weight)
    if loops is None or not math.isfinite(weight.sum()):
        return None
    frames, space = spikes.shape[0], output_space(spikes.shape[2:], weight.shape[2:], geometry)
    parts, sizes = _parts(frames, spikes.shape[2:], space, weight, geometry)
    out = empty_strided((frames * space.numel(), columns), (columns, 1), weight.dtype, weight.device)
    channels, lines = spikes.shape[1], max(1, _PIXELS // sizes[3])
    if spikes.share >= _MANY:
        cuts, at_once = _cuts(columns, weight.dtype, _NARROW), (1, 1)
    else:
        cuts = _cuts(columns, weight.dtype, _L2 // channels)
        at_once = max(1, _L2 // (channels * int(cuts[0, 1]) * loops.HALF_LINE)), channels
    arrays = spikes.bits, spikes.values, _by_place(weight).numpy(), out.numpy()
    where = sizes, geometry.stride, _offsets(weight, geometry)
    run(loops.outputs, parts * -(-sizes[2] // lines), *arrays, cuts, *where, lines, at_once)
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
    of_thread = -(-columns // torch.get_num_threads()) * total.element_size()
    pixels, most = (_FEW_PIXELS, _NARROW) if spikes.share >= _MANY else (_PIXELS, of_thread)
    cuts, lines = _cuts(columns, total.dtype, min(most, of_thread)), max(1, pixels // sizes[1])
    gradients = grad.movedim(1, -1).reshape(-1, columns)
    arrays = spikes.bits, spikes.values, gradients.numpy(), by_place.numpy()
    run(loops.weight_gradients, len(cuts), *arrays, cuts, sizes, _offsets(total, geometry), lines)
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


def _offsets(weight: Tensor, geometry: Geometry) -> np.ndarray:
    """How far each place of a kernel is from where it is put, in rows and columns, `[kh kw, 2]`."""
    far = np.indices(weight.shape[2:]).reshape(2, -1).T * geometry.dilation
    return np.ascontiguousarray(far - np.array(geometry.padding))


def _by_place(weight: Tensor) -> Tensor:
    """`[out, C, k, k]` -> `[k k C, >= out]`, in rows that do not all fall on the same lines of a cache."""
    rows = weight.detach().movedim(1, -1).reshape(len(weight), -1).t().contiguous()
    if rows[0].nbytes % (16 * _LINE):
        return rows
    spread = rows.new_empty(len(rows), rows.shape[1] + 8 * _LINE // rows.element_size())
    spread[:, : rows.shape[1]] = rows
    return spread


def _cuts(columns: int, dtype: torch.dtype, most: int) -> np.ndarray:
    """Blocks of at most so many bytes of columns, as few as can be: the first column of each, and how many half lines
    of the cache it has. `[blocks, 2]`."""
    from megasnn.kernels.sparse.loops import BLOCKS, HALF_LINE

    found, half = [], 0
    halves = columns * dtype.itemsize // HALF_LINE
    while half < halves:
        size = next(block for block in BLOCKS if block == 1 or block <= min(halves - half, most // HALF_LINE))
        found.append((half * HALF_LINE // dtype.itemsize, size))
        half += size
    return np.array(found)
