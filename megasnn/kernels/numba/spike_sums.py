"""Convolution output and weight gradient from spikes or counts on a CPU: time grows with the spikes.

A zero adds nothing and is skipped. A spike adds a row of the weight, or of the output gradient. `Work` predicts
whether that is faster than the dense product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megasnn.kernels.convolution import Geometry, output_space
from megasnn.kernels.layout import empty
from megasnn.kernels.numba import spike_sum_loops as loops
from megasnn.kernels.numba.jit import run_kernel
from megasnn.kernels.spike_codec import Content, bits_of, pack_where_not_zero

SUMMED_TYPES = (torch.float32, torch.float64)

# From this share of spikes on, each row is added so often that all of them should lie in an L1 cache: blocks of columns
# are narrow, and take 64 channels or 64 pixels at a time. Otherwise blocks are wide, and their rows fit in most of an
# L2 cache.
_MANY = 0.1
_NARROW = 512  # bytes of a block
_L2 = 640 * 2**10  # bytes
_PIXELS = 256  # listed at once
_FEW_PIXELS = 64  # listed at once, in narrow blocks
_LINE = 64  # bytes of a cache line
LIMIT = 1.0
"""Sums are formed up to this time, relative to the dense product."""
# Times, in multiplications and additions of the dense product. They decide instead of measured times, so that runs with
# equal numbers of threads decide alike. They were fitted by hand to times of one core, of an AMD EPYC (Zen 4) and an
# Intel Xeon (Emerald Rapids), for layers of 16 to 1,536 channels, 1 x 1 and 3 x 3, on 64 to 32,768 pixels.
_ADDING = 2.5  # a term, in long rows; shorter ones leave registers idle
_LONG = 512  # bytes of a long row
_LISTING = 150.0  # a spike
_PACKING = 45.0  # a value of the input
_STARTING = 750.0  # starting the loop for one pixel at one kernel position
_TURNING = 100.0  # a value of the weight
_CALLING = 45e6  # the loops
_SHARING = 0.13  # share of a weight gradient's work that every thread repeats


@dataclass(frozen=True)
class Spikes:
    """Nonzero positions in an input `[frames, C, H, W]` of spikes, ternary ones, counts or averages.

    Attributes:
        words: `[pixels, C / 64]`, rounded up: bits packed as in `megasnn.kernels.spike_codec`, channels last.
        share: nonzero fraction.
        values: the input's values `[pixels, C]`; `[0, C]` where all nonzero ones are 1.
    """

    shape: torch.Size
    words: np.ndarray
    share: float
    values: np.ndarray


def sparse_output(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor | None:
    """Convolves `[frames, C, H, W]` with `[out, C, k, k]`: `[frames, out, H', W']`, channels last.

    Returns None where the dense product is faster, the loops do not fit, or the weight is not finite.
    """
    work = _work(x.device, x.dtype, x.shape, weight, geometry)
    if work is None or not work.is_worth(0.0):
        return None
    spikes = spikes_in(x)
    if spikes is None or not work.is_worth(spikes.share):
        return None
    weight = weight.detach()
    # The dense product shows a weight that is not finite even where it meets no spike.
    return _sums(spikes, weight, geometry) if math.isfinite(weight.sum()) else None


def add_sparse_weight_gradient(total: Tensor, grad: Tensor, x: Tensor, geometry: Geometry) -> bool:
    """`megasnn.kernels.convolution.add_weight_gradient` for strides of 1.

    Returns False, and does nothing, where the dense product is faster or the loops do not fit.
    """
    work = _work_of_gradient(total, grad, x.shape, geometry)
    if work is None or x.device != grad.device or x.dtype != grad.dtype:
        return False
    spikes = spikes_in(x)
    return spikes is not None and _add_sums(work, total, grad.detach(), spikes, geometry)


def add_sparse_weight_gradient_of_bits(
    total: Tensor, grad: Tensor, packed: Tensor, shape: torch.Size, geometry: Geometry
) -> bool:
    """As `add_sparse_weight_gradient`, from packed spikes, channels last."""
    work = _work_of_gradient(total, grad, shape, geometry)
    if work is None or packed.device != grad.device:
        return False
    return _add_sums(work, total, grad.detach(), _spikes_in_bits(packed, shape, grad.dtype), geometry)


def spikes_in(x: Tensor) -> Spikes | None:
    """None unless the channels are last in memory."""
    rows = x.detach().movedim(1, -1)
    if not rows.is_contiguous():
        return None
    known = bits_of(x)
    if known is not None:
        return _spikes_in_bits(known, x.shape, x.dtype)
    values = rows.reshape(-1, x.shape[1]).numpy()
    ternary = bits_of(x, Content.TERNARY)
    if ternary is not None:
        above, below = ternary.view(2, -1)
        return _spikes(above | below, x.shape, values)
    packed, all_one = pack_where_not_zero(rows)
    if all_one:
        values = values[:0]
    return _spikes(packed, x.shape, values)


def _spikes_in_bits(packed: Tensor, shape: torch.Size, dtype: torch.dtype) -> Spikes:
    return _spikes(packed, shape, torch.empty(0, shape[1], dtype=dtype).numpy())


def _spikes(packed: Tensor, shape: torch.Size, values: np.ndarray) -> Spikes:
    rows = packed.numpy().reshape(-1, shape[1] // 8)
    if rows.shape[1] % 8:
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))
    words = np.require(rows.view(np.uint64), requirements="A")
    count = int(np.bitwise_count(words).sum(dtype=np.int64))
    return Spikes(shape, words, count / shape.numel(), values)


def _work(
    device: torch.device, dtype: torch.dtype, shape: torch.Size, weight: Tensor, geometry: Geometry
) -> Work | None:
    """None where the loops do not fit."""
    # The dense product then reports wrong shapes.
    if device.type != "cpu" or weight.device != device or geometry.groups != 1:
        return None
    if dtype != weight.dtype or dtype not in SUMMED_TYPES:
        return None
    if not len(weight) or len(weight) % 8 or shape[1] % 8 or not shape.numel() or weight.shape[1] != shape[1]:
        return None
    space = output_space(shape[2:], weight.shape[2:], geometry)
    if min(space) < 1:
        return None
    places = weight.shape[2:].numel()
    return Work(shape[0] * space.numel(), shape[1], len(weight), places, dtype.itemsize)


def _work_of_gradient(total: Tensor, grad: Tensor, shape: torch.Size, geometry: Geometry) -> Work | None:
    if geometry.stride != (1, 1):
        return None
    work = _work(grad.device, grad.dtype, shape, total, geometry)
    if work is None or not work.is_worth(0.0, torch.get_num_threads()):
        return None
    space = output_space(shape[2:], total.shape[2:], geometry)
    return work if grad.shape == (shape[0], len(total), *space) else None


def _sums(spikes: Spikes, weight: Tensor, geometry: Geometry) -> Tensor:
    columns = len(weight)
    frames, channels = spikes.shape[:2]
    space = output_space(spikes.shape[2:], weight.shape[2:], geometry)
    parts, sizes = _parts(frames, spikes.shape[2:], space, weight, geometry)
    out = empty((frames * space.numel(), columns), weight.dtype, weight.device)
    out_height, out_width = sizes[2:]
    rows = max(1, _PIXELS // out_width)
    if spikes.share >= _MANY:
        cuts = _cuts(columns, weight.dtype, _NARROW)
        at_once = (1, 1)
    else:
        cuts = _cuts(columns, weight.dtype, _L2 // channels)
        block_bytes = int(cuts[0, 1]) * loops.HALF_LINE
        at_once = (max(1, _L2 // (channels * block_bytes)), channels)
    arrays = (spikes.words, spikes.values, _by_pixel(weight).numpy(), out.numpy())
    slices = parts * -(-out_height // rows)
    offsets = _offsets(weight, geometry)
    run_kernel(loops.outputs, slices, *arrays, cuts, sizes, geometry.stride, offsets, rows, at_once)
    return out.view(frames, *space, columns).movedim(-1, 1)


def _add_sums(work: Work, total: Tensor, grad: Tensor, spikes: Spikes, geometry: Geometry) -> bool:
    columns = len(total)
    threads = torch.get_num_threads()
    if not work.is_worth(spikes.share, threads):
        return False
    _, sizes = _parts(spikes.shape[0], spikes.shape[2:], grad.shape[2:], total, geometry)
    places = total[0].numel()
    by_place = empty((places, columns), total.dtype, total.device).zero_()
    block_bytes = -(-columns // threads) * total.element_size()
    pixels = _PIXELS
    if spikes.share >= _MANY:
        block_bytes = min(_NARROW, block_bytes)
        pixels = _FEW_PIXELS
    cuts = _cuts(columns, total.dtype, block_bytes)
    rows = max(1, pixels // sizes[1])
    gradients = grad.movedim(1, -1).reshape(-1, columns)
    seen = np.zeros(columns, spikes.values.dtype)
    arrays = (spikes.words, spikes.values, gradients.numpy(), by_place.numpy(), seen)
    run_kernel(loops.weight_gradients, len(cuts), *arrays, cuts, sizes, _offsets(total, geometry), rows)
    if not np.isfinite(seen).all():
        # The dense product would have multiplied these gradients with zeros.
        by_place += torch.from_numpy(seen)
    turned = empty((columns, places), total.dtype, total.device).copy_(by_place.t())
    total += turned.view(columns, *total.shape[2:], total.shape[1]).movedim(-1, 1)
    return True


def _parts(
    frames: int, space: torch.Size, output_space: torch.Size, weight: Tensor, geometry: Geometry
) -> tuple[int, tuple[int, int, int, int]]:
    """Number of frames, and the heights and widths of input and output.

    A pointwise convolution takes all pixels in all frames as one column.
    """
    if weight.shape[2:] == (1, 1) and geometry == Geometry():
        pixels = frames * space.numel()
        return 1, (pixels, 1, pixels, 1)
    return frames, (space[0], space[1], output_space[0], output_space[1])


def _offsets(weight: Tensor, geometry: Geometry) -> np.ndarray:
    """Rows and columns from an output's input pixel to each kernel place, `[kh kw, 2]`."""
    far = np.indices(weight.shape[2:]).reshape(2, -1).T * geometry.dilation
    return np.ascontiguousarray(far - np.array(geometry.padding))


def _by_pixel(weight: Tensor) -> Tensor:
    """`[out, C, k, k]` -> `[k k C, >= out]`."""
    rows = weight.movedim(1, -1).reshape(len(weight), -1).t()
    columns = len(weight)
    itemsize = weight.element_size()
    spare = 0
    if columns * itemsize % (16 * _LINE) == 0:
        # Otherwise all rows would fall on the same lines of a cache.
        spare = 8 * _LINE // itemsize
    spread = empty((len(rows), columns + spare), weight.dtype, weight.device)
    spread[:, :columns] = rows
    return spread


def _cuts(columns: int, dtype: torch.dtype, most: int) -> np.ndarray:
    """Fewest column blocks with at most `most` bytes each: `[blocks, 2]`, first column and half lines."""
    found = []
    half = 0
    halves = columns * dtype.itemsize // loops.HALF_LINE
    while half < halves:
        most_halves = max(1, min(halves - half, most // loops.HALF_LINE))
        size = next(block for block in loops.BLOCKS if block <= most_halves)
        found.append((half * loops.HALF_LINE // dtype.itemsize, size))
        half += size
    return np.array(found)


@dataclass(frozen=True)
class Work:
    """A product's sizes: output pixels in all frames, channels, kernel places, value bytes."""

    pixels: int
    channels: int
    columns: int
    places: int
    itemsize: int

    def is_worth(self, share: float, threads: int = 1) -> bool:
        """True where sums take no longer than the dense product.

        Args:
            share: the input's nonzero fraction.
            threads: for a weight gradient; 1 for an output.
        """
        products_per_value = self.columns * self.places
        adding = _ADDING * max(1.0, _LONG / (self.columns * self.itemsize))
        per_value = share * (adding + _LISTING / products_per_value) + _PACKING / products_per_value
        once = _TURNING / self.pixels + _CALLING / (2 * self.pixels * self.channels * products_per_value)
        time = per_value + once + _STARTING / (self.channels * self.columns) + _SHARING * (threads - 1)
        return time <= LIMIT
