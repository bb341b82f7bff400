"""Outputs and gradients of weights of a convolution of spikes or counts on a CPU, in time that grows with the spikes.

Where an input is 0 nothing is added to a dense sum, so nothing is computed: what a spike adds is a row of the weight,
or of the gradient of the output.

A rule predicts the time of such a sum relative to the dense product, so that runs with as many threads decide alike.
It was fitted by hand to times of one core, an AMD EPYC (Zen 4) and an Intel Xeon (Emerald Rapids), of layers of 16 to
1,536 channels, 1 x 1 and 3 x 3, on 64 to 32,768 pixels.
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
from megasnn.kernels.spike_codec import bits_of, pack_where_not_zero

SUMMED_TYPES = torch.float32, torch.float64

# From this share on, each row is added so often that it is worth having all of them in an L1 cache: in narrow blocks of
# columns, 64 channels or 64 pixels at a time. Otherwise blocks are wide, and their rows fit in most of an L2 cache.
_MANY = 0.1
_NARROW = 512  # bytes of a block
_L2 = 640 * 2**10  # bytes
_PIXELS, _FEW_PIXELS = 256, 64  # that are listed at once
_LINE = 64  # bytes
LIMIT = 1.0
"""Up to which sums are formed."""
_ADDING = 2.5  # a term, where rows are long; shorter ones leave registers idle
_LONG = 512  # bytes of a row
_LISTING = 150.0  # a spike, against a multiplication and addition of the dense product
_PACKING = 45.0  # a value of the input
_STARTING = 750.0  # the terms of a pixel at a place of the kernel
_TURNING = 100.0  # a value of the weight
_CALLING = 45e6  # the loops
_SHARING = 0.13  # what each thread of a weight gradient does that the others do, too


@dataclass(frozen=True)
class Spikes:
    """Places at which an input of spikes, counts or averages is not 0.

    Attributes:
        shape: of the input, `[frames, C, H, W]`.
        words: `[pixels, C / 64]`, rounded up: bits as `megasnn.kernels.spike_codec` packs spikes, channels last.
        share: of values that are not 0.
        values: of the input, `[pixels, C]`; `[0, C]` where all that are not 0 are 1.
    """

    shape: torch.Size
    words: np.ndarray
    share: float
    values: np.ndarray


def output(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor | None:
    """Convolves an input `[frames, C, H, W]` with a weight `[out, C, k, k]`: `[frames, out, H', W']`, channels last.

    None where a dense product takes less time, or loops do not take it; and where the weight is not finite, which
    is to be seen also where no spike meets it.
    """
    work = _work(x.device, x.dtype, x.shape, weight, geometry)
    if work is None or not work.is_worth(0.0) or (spikes := spikes_in(x)) is None or not work.is_worth(spikes.share):
        return None
    return _sums(spikes, weight.detach(), geometry) if math.isfinite(weight.detach().sum()) else None


def add_spike_weight_gradient(total: Tensor, grad: Tensor, x: Tensor, geometry: Geometry) -> bool:
    """total += the gradient of the weight; False, and nothing is done, where `output` would give None for such a
    weight, and where strides are not 1.

    Args: as of `megasnn.kernels.convolution.add_weight_gradient`.
    """
    work = _work_of_gradient(total, grad, x.shape, geometry)
    spikes = None if work is None or x.device != grad.device or x.dtype != grad.dtype else spikes_in(x)
    return work is not None and spikes is not None and _add_sums(work, total, grad.detach(), spikes, geometry)


def add_weight_gradient_of_bits(
    total: Tensor, grad: Tensor, packed: Tensor, shape: torch.Size, geometry: Geometry
) -> bool:
    """The same of spikes of this shape that are packed, channels last."""
    work = _work_of_gradient(total, grad, shape, geometry)
    if work is None or packed.device != grad.device:
        return False
    return _add_sums(work, total, grad.detach(), _spikes_in_bits(packed, shape, grad.dtype), geometry)


def spikes_in(x: Tensor) -> Spikes | None:
    """Spikes of an input whose channels are last in memory; None for others."""
    rows = x.detach().movedim(1, -1)
    if not rows.is_contiguous():
        return None
    known = bits_of(x)
    if known is not None:
        return _spikes_in_bits(known, x.shape, x.dtype)
    packed, all_one = pack_where_not_zero(rows)
    values = rows.reshape(-1, x.shape[1]).numpy()
    return _spikes(packed, x.shape, values[:0] if all_one else values)


def _spikes_in_bits(packed: Tensor, shape: torch.Size, dtype: torch.dtype) -> Spikes:
    return _spikes(packed, shape, torch.empty(0, shape[1], dtype=dtype).numpy())


def _spikes(packed: Tensor, shape: torch.Size, values: np.ndarray) -> Spikes:
    rows = packed.numpy().reshape(-1, shape[1] // 8)
    if rows.shape[1] % 8:
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))
    words = np.require(rows.view(np.uint64), requirements="A")
    return Spikes(shape, words, int(np.bitwise_count(words).sum(dtype=np.int64)) / shape.numel(), values)


def _work(
    device: torch.device, dtype: torch.dtype, shape: torch.Size, weight: Tensor, geometry: Geometry
) -> Work | None:
    """None where loops do not take it; dense products then say what is wrong with shapes that do not fit."""
    if (
        device.type != "cpu"
        or weight.device != device
        or not dtype == weight.dtype in SUMMED_TYPES
        or geometry.groups != 1
    ):
        return None
    if not len(weight) or len(weight) % 8 or shape[1] % 8 or not shape.numel() or weight.shape[1] != shape[1]:
        return None
    space = output_space(shape[2:], weight.shape[2:], geometry)
    if min(space) < 1:
        return None
    places = weight.shape[2:].numel()
    return Work(shape[0] * space.numel(), shape[1], len(weight), places, dtype.itemsize)


def _work_of_gradient(total: Tensor, grad: Tensor, shape: torch.Size, geometry: Geometry) -> Work | None:
    work = _work(grad.device, grad.dtype, shape, total, geometry) if geometry.stride == (1, 1) else None
    if work is None or not work.is_worth(0.0, torch.get_num_threads()):
        return None
    space = output_space(shape[2:], total.shape[2:], geometry)
    return work if grad.shape == (shape[0], len(total), *space) else None


def _sums(spikes: Spikes, weight: Tensor, geometry: Geometry) -> Tensor:
    columns, frames = len(weight), spikes.shape[0]
    space = output_space(spikes.shape[2:], weight.shape[2:], geometry)
    parts, sizes = _parts(frames, spikes.shape[2:], space, weight, geometry)
    out = empty((frames * space.numel(), columns), weight.dtype, weight.device)
    channels, lines = spikes.shape[1], max(1, _PIXELS // sizes[3])
    if spikes.share >= _MANY:
        cuts, at_once = _cuts(columns, weight.dtype, _NARROW), (1, 1)
    else:
        cuts = _cuts(columns, weight.dtype, _L2 // channels)
        at_once = max(1, _L2 // (channels * int(cuts[0, 1]) * loops.HALF_LINE)), channels
    arrays = spikes.words, spikes.values, _by_pixel(weight).numpy(), out.numpy()
    where = sizes, geometry.stride, _offsets(weight, geometry)
    run_kernel(loops.outputs, parts * -(-sizes[2] // lines), *arrays, cuts, *where, lines, at_once)
    return out.view(frames, *space, columns).movedim(-1, 1)


def _add_sums(work: Work, total: Tensor, grad: Tensor, spikes: Spikes, geometry: Geometry) -> bool:
    columns, threads = len(total), torch.get_num_threads()
    if not work.is_worth(spikes.share, threads):
        return False
    _, sizes = _parts(spikes.shape[0], spikes.shape[2:], grad.shape[2:], total, geometry)
    places = total[0].numel()
    by_place = empty((places, columns), total.dtype, total.device).zero_()
    of_thread = -(-columns // threads) * total.element_size()
    pixels, most = (_FEW_PIXELS, _NARROW) if spikes.share >= _MANY else (_PIXELS, of_thread)
    cuts, lines = _cuts(columns, total.dtype, min(most, of_thread)), max(1, pixels // sizes[1])
    gradients, seen = grad.movedim(1, -1).reshape(-1, columns), np.zeros(columns, spikes.values.dtype)
    arrays = spikes.words, spikes.values, gradients.numpy(), by_place.numpy(), seen
    run_kernel(loops.weight_gradients, len(cuts), *arrays, cuts, sizes, _offsets(total, geometry), lines)
    if not np.isfinite(seen).all():  # what a dense product would have multiplied with zeros
        by_place += torch.from_numpy(seen)
    turned = empty((columns, places), total.dtype, total.device).copy_(by_place.t())
    total += turned.view(columns, *total.shape[2:], total.shape[1]).movedim(-1, 1)
    return True


def _parts(
    frames: int, space: torch.Size, output_space: torch.Size, weight: Tensor, geometry: Geometry
) -> tuple[int, tuple[int, int, int, int]]:
    """Number of frames, their height and width and those of the output: all pixels are one column where
    each is by itself."""
    if weight.shape[2:] == (1, 1) and geometry == Geometry():
        pixels = frames * space.numel()
        return 1, (pixels, 1, pixels, 1)
    return frames, (space[0], space[1], output_space[0], output_space[1])


def _offsets(weight: Tensor, geometry: Geometry) -> np.ndarray:
    """Distance of each place of a kernel from where it is put, in rows and columns, `[kh kw, 2]`."""
    far = np.indices(weight.shape[2:]).reshape(2, -1).T * geometry.dilation
    return np.ascontiguousarray(far - np.array(geometry.padding))


def _by_pixel(weight: Tensor) -> Tensor:
    """`[out, C, k, k]` -> `[k k C, >= out]`, in rows that do not all fall on the same lines of a cache."""
    rows = weight.movedim(1, -1).reshape(len(weight), -1).t()
    columns, itemsize = len(weight), weight.element_size()
    spare = 8 * _LINE // itemsize if columns * itemsize % (16 * _LINE) == 0 else 0
    spread = empty((len(rows), columns + spare), weight.dtype, weight.device)
    spread[:, :columns] = rows
    return spread


def _cuts(columns: int, dtype: torch.dtype, most: int) -> np.ndarray:
    """Blocks of at most so many bytes of columns, as few as can be: the first column of each, and how many half lines
    of the cache it has. `[blocks, 2]`."""
    found, half = [], 0
    halves = columns * dtype.itemsize // loops.HALF_LINE
    while half < halves:
        most_halves = max(1, min(halves - half, most // loops.HALF_LINE))
        size = next(block for block in loops.BLOCKS if block <= most_halves)
        found.append((half * loops.HALF_LINE // dtype.itemsize, size))
        half += size
    return np.array(found)


@dataclass(frozen=True)
class Work:
    """A product, as what decides how long it takes.

    Attributes:
        pixels: of all frames of the output.
        channels, columns: of the input and of the output.
        places: of the kernel.
        itemsize: bytes of a value.
    """

    pixels: int
    channels: int
    columns: int
    places: int
    itemsize: int

    def is_worth(self, share: float, threads: int = 1) -> bool:
        """True where sums take no longer than the dense product.

        Args:
            share: of the input's values that are not 0.
            threads: that share out a weight gradient; an output's is the same with any number.
        """
        of_pixel = self.columns * self.places
        adding = _ADDING * max(1.0, _LONG / (self.columns * self.itemsize))
        per_value = share * (adding + _LISTING / of_pixel) + _PACKING / of_pixel
        once = _TURNING / self.pixels + _CALLING / (2 * self.pixels * self.channels * of_pixel)
        time = per_value + once + _STARTING / (self.channels * self.columns) + _SHARING * (threads - 1)
        return time <= LIMIT
