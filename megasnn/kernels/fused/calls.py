"""The four calls of a norm-(pool-)neuron unit, with tensors: see `megasnn.kernels.norm_neuron`."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from megasnn.kernels.codec import pack_bits
from megasnn.kernels.fused import pool
from megasnn.kernels.fused import unit as loops
from megasnn.kernels.fused.neuron import Constants, constants
from megasnn.kernels.layout import empty_array
from megasnn.kernels.norm_neuron import Norm, Unit
from megasnn.kernels.reference import REDUCED
from megasnn.kernels.runtime import run
from megasnn.kernels.spec import NeuronSpec

_ROW = 512  # elements that are summed side by side, rounded up to whole pixels
_ROWS = 32  # rows of a unit that sums: short enough for float32, long enough that folding costs nothing
_BLOCK = 8  # rows of a block: longer ones read memory faster, and potentials of all steps have room in the L2 cache


def statistics(x: Tensor) -> Tensor:
    data = _pixels(x)
    channels = data.shape[-1]
    width = _width(channels)
    pixels = data.size // channels
    run_length = _ROWS * width // channels
    units = pieces(pixels, run_length)
    means, squares = np.empty((units, channels)), np.empty((units, channels))
    run(loops.statistics, units, data.reshape(-1), channels, width, _ROWS, means, squares)
    counts = np.full((units, 1), run_length, np.float64)
    counts[-1] = pixels - run_length * (units - 1)
    mean = (counts * means).sum(axis=0) / pixels
    variance = (squares + counts * (means - mean) ** 2).sum(axis=0) / pixels
    return torch.from_numpy(np.stack((mean, variance)))


def fire(x: Tensor, norm: Norm, w: Tensor | None, unit: Unit, packed: bool = False) -> tuple[Tensor, Tensor | None]:
    data = _pixels(x)
    inputs, samples, *space, channels = data.shape
    if unit.pool:
        space = [pieces(side, 2) for side in space]
    out = empty_array((unit.time_steps, samples, *space, channels), data.dtype)
    flat = out.reshape(unit.time_steps, -1)
    p = constants_of(unit.spec, data.dtype, w, learn=False)
    length = space[1] * channels if unit.pool else _BLOCK * _width(channels)
    scale, shift, _ = _tiles(norm, unit.eps, length, data.dtype)
    if unit.pool:
        run(pool.fire_pooled, samples * space[0], data, scale, shift, flat, p)
    else:
        run(loops.fire_block, pieces(flat.shape[1], length), data.reshape(inputs, -1), scale, shift, flat, p)
    spikes = _tensor(out, x)
    return spikes, pack_bits(spikes) if packed else None


def backward_sums(
    x: Tensor, g_spikes: Tensor, norm: Norm, w: Tensor | None, unit: Unit, learn: bool
) -> tuple[Tensor, np.ndarray]:
    """What is carried is the gradient of the normalised input: computing it again would take longer than reading it."""
    data, upstream = _pixels(x), _pixels(g_spikes)
    inputs, channels = data.shape[0], data.shape[-1]
    flat = upstream.reshape(unit.time_steps, -1)
    g = empty_array(data.shape, data.dtype)
    p = constants_of(unit.spec, data.dtype, w, learn)
    width = _width(channels)
    length = upstream.shape[3] * channels if unit.pool else _BLOCK * width
    tiles = _tiles(norm, unit.eps, length, data.dtype)
    if unit.pool:
        sums = np.empty((data.shape[1], 3, channels))
        run(pool.pooled_backward, len(sums), data, flat, *tiles, g, sums, p)
    else:
        sums = np.empty((pieces(flat.shape[1], width * _ROWS), 3, channels))
        rows = data.reshape(inputs, -1), flat, *tiles, g.reshape(inputs, -1)
        run(loops.block_backward, len(sums), *rows, sums, channels, _ROWS // _BLOCK, p)
    return torch.from_numpy(sums.sum(axis=0)), g


def input_gradient(
    x: Tensor,
    g_spikes: Tensor,
    norm: Norm,
    w: Tensor | None,
    unit: Unit,
    sums: Tensor | None,
    count: int,
    carried: np.ndarray,
) -> Tensor:
    data = _pixels(x)
    channels = data.shape[-1]
    length = _BLOCK * _width(channels)
    scale, _, mean = _tiles(norm, unit.eps, length, data.dtype)
    sum_g, sum_gx = np.zeros((2, channels)) if sums is None else sums[:2].numpy()
    mean_g = _tile(sum_g / count, length, data.dtype)
    mean_gx = _tile(sum_gx * _inverse_deviation(norm, unit.eps) ** 2 / count, length, data.dtype)
    flat, g = data.reshape(-1), carried.reshape(-1)
    run(loops.input_gradient, pieces(flat.size, length), flat, g, scale, mean, mean_g, mean_gx)
    return _tensor(carried, x)


def constants_of(spec: NeuronSpec, dtype: np.dtype, w: Tensor | None, learn: bool) -> Constants:
    """A neuron as the numbers that the loops take. w: what its learned factor is the sigmoid of, where it learns."""
    if w is None:
        return _fixed_constants(spec, dtype, learn)
    number = torch.float64 if dtype == np.float64 else torch.float32
    return constants(spec, dtype, float(torch.sigmoid(w.detach().to(number))), learn)


@cache
def _fixed_constants(spec: NeuronSpec, dtype: np.dtype, learn: bool) -> Constants:
    return constants(spec, dtype, 0.0, learn)


def _inverse_deviation(norm: Norm, eps: float) -> np.ndarray:
    return 1.0 / np.sqrt(_double(norm.variance) + eps)


def _tiles(norm: Norm, eps: float, length: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The normalised input is scale x + shift: scale, shift and mean, repeated to a row of that length."""
    mean, inverse = _double(norm.mean), _inverse_deviation(norm, eps)
    scale = inverse if norm.weight is None else inverse * _double(norm.weight)
    shift = -mean * scale if norm.bias is None else _double(norm.bias) - mean * scale
    return _tile(scale, length, dtype), _tile(shift, length, dtype), _tile(mean, length, dtype)


def _tile(values: np.ndarray, length: int, dtype: np.dtype) -> np.ndarray:
    """`values [C]` repeated, as `np.tile` gives it, which takes several times longer for so few."""
    tiled = np.empty((length // len(values), len(values)), dtype)
    tiled[:] = values
    return tiled.reshape(-1)


def _pixels(x: Tensor) -> np.ndarray:
    """`[T, N, C, ...]` as a contiguous array `[T, N, ..., C]`, without a copy where the memory is channels-last."""
    x = x.detach().movedim(2, -1)
    return (x.float() if x.dtype in REDUCED else x).contiguous().numpy()


def _tensor(pixels: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(pixels).movedim(-1, 2).to(like.dtype)


def _double(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def _width(channels: int) -> int:
    return channels * pieces(_ROW, channels)


def pieces(whole: int, size: int) -> int:
    """Of that size, that make up the whole; the last may be shorter."""
    return -(-whole // size)
