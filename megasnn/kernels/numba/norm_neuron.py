"""Norm, pooling and neuron by compiled loops: see `megasnn.kernels.norm_neuron`; and neurons without a norm."""

from __future__ import annotations

import sys
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megasnn.kernels.layout import empty_array
from megasnn.kernels.neuron import neuron_by
from megasnn.kernels.neuron_spec import NeuronSpec
from megasnn.kernels.norm_neuron import Norm, NormNeuron
from megasnn.kernels.numba import loops, pool
from megasnn.kernels.numba.jit import run_kernel
from megasnn.kernels.numba.step import Constants, constants
from megasnn.kernels.spike_codec import pack_bits
from megasnn.kernels.torch_backend import REDUCED

_ROW = 512  # elements that are summed side by side, rounded up to whole pixels
_ROWS = 32  # rows of a unit that sums: short enough for float32, long enough that folding costs nothing
_BLOCK = 8  # rows of a block of neurons, whose gradients are summed side by side
_ROW_BLOCK = 1024  # elements: with the potentials of 4 to 10 steps they stay in the L1 cache
neuron_multi_step = partial(neuron_by, sys.modules[__name__])


def statistics(x: Tensor) -> Tensor:
    data = _pixels(x)
    channels = data.shape[-1]
    width = channels * pieces(_ROW, channels)
    pixels = data.size // channels
    run_length = _ROWS * width // channels
    slices = pieces(pixels, run_length)
    means, squares = np.empty((slices, channels)), np.empty((slices, channels))
    run_kernel(loops.slice_statistics, slices, data.reshape(-1), channels, width, _ROWS, means, squares)
    merged = np.empty((2, channels))
    run_kernel(loops.merge, 1, means, squares, run_length, pixels, merged)
    return torch.from_numpy(merged)


def fire(
    x: Tensor, norm: Norm, w: Tensor | None, norm_neuron: NormNeuron, packed: bool = False
) -> tuple[Tensor, Tensor | None]:
    data = _pixels(x)
    inputs, samples, *sides, channels = data.shape
    space = norm_neuron.space_of_spikes(sides)
    out = empty_array((norm_neuron.time_steps, samples, *space, channels), data.dtype)
    flat = out.reshape(norm_neuron.time_steps, -1)
    p = constants_of(norm_neuron.spec, data.dtype, w, learn=False)
    length = space[1] * channels if norm_neuron.pool else _BLOCK * channels * pieces(_ROW, channels)
    whole_bytes = packed and length % 8 == 0 and flat.shape[1] % 8 == 0
    bits = empty_array((flat.size // 8,), np.dtype(np.uint8)) if whole_bytes else no_bits()
    mean, _, scale, shift = _affine(norm, norm_neuron.eps)
    coefficients = _tiles(length, data.dtype, scale, shift, mean)
    if norm_neuron.pool:
        run_kernel(pool.fire_pooled, samples * space[0], data, norm_neuron.above, coefficients, flat, bits, p)
    else:
        rows = data.reshape(inputs, -1), coefficients, None, None, flat, bits
        run_kernel(loops.fire_block, pieces(flat.shape[1], length), *rows, p, length)
    spikes = torch.from_numpy(out).movedim(-1, 2).to(x.dtype)
    if not packed:
        return spikes, None
    return spikes, torch.from_numpy(bits) if whole_bytes else pack_bits(spikes)


def no_bits() -> np.ndarray:
    """For `time_loop.fire_run`, where spikes are not wanted as bits."""
    return np.empty(0, np.uint8)


def backward_sums(
    x: Tensor, g_spikes: Tensor, norm: Norm, w: Tensor | None, norm_neuron: NormNeuron, learn: bool
) -> tuple[Tensor, np.ndarray, None]:
    """Carries the gradient of the normalised input: computing it again would take longer than reading it."""
    data, upstream = _pixels(x), _pixels(g_spikes)
    inputs, channels = data.shape[0], data.shape[-1]
    flat = upstream.reshape(norm_neuron.time_steps, -1)
    g = empty_array(data.shape, data.dtype)
    p = constants_of(norm_neuron.spec, data.dtype, w, learn)
    width = channels * pieces(_ROW, channels)
    length = upstream.shape[3] * channels if norm_neuron.pool else _BLOCK * width
    mean, _, scale, shift = _affine(norm, norm_neuron.eps)
    coefficients = _tiles(length, data.dtype, scale, shift, mean)
    if norm_neuron.pool:
        sums = np.empty((data.shape[1], 3, channels))
        run_kernel(pool.pooled_backward, len(sums), data, norm_neuron.above, flat, coefficients, g, sums, p)
    else:
        sums = np.empty((pieces(flat.shape[1], width * _ROWS), 3, channels))
        rows = data.reshape(inputs, -1), coefficients, None, flat, None, g.reshape(inputs, -1)
        run_kernel(loops.block_backward, len(sums), *rows, sums, channels, length, _ROWS // _BLOCK, p)
    return torch.from_numpy(sums.sum(axis=0)), g, None


def input_gradient(
    x: Tensor,
    g_spikes: Tensor,
    norm: Norm,
    w: Tensor | None,
    norm_neuron: NormNeuron,
    sums: Tensor | None,
    count: int,
    carried: np.ndarray,
) -> Tensor:
    data = _pixels(x)
    channels = data.shape[-1]
    width = channels * pieces(_ROW, channels)
    mean, inverse_deviation, scale, _ = _affine(norm, norm_neuron.eps)
    sum_g, sum_gx = np.zeros((2, channels)) if sums is None else sums[:2].numpy()
    of_deviations = sum_gx * inverse_deviation**2
    coefficients = _tiles(width, data.dtype, scale, mean, sum_g / count, of_deviations / count)
    rows = data.reshape(1, -1), carried.reshape(1, -1), coefficients
    run_kernel(loops.norm_input_gradient, pieces(data.size, _ROWS * width), *rows, _ROWS * width)
    return torch.from_numpy(carried).movedim(-1, 2).to(x.dtype)


def constants_of(spec: NeuronSpec, dtype: np.dtype, w: Tensor | None, learn: bool) -> Constants:
    """A neuron as the numbers that the loops take. w: what its learned factor is the sigmoid of, where it learns."""
    if w is None:
        return _fixed_constants(spec, dtype, learn)
    number = torch.float64 if dtype == np.float64 else torch.float32
    return constants(spec, dtype, float(torch.sigmoid(w.detach().to(number))), learn)


@cache
def _fixed_constants(spec: NeuronSpec, dtype: np.dtype, learn: bool) -> Constants:
    return constants(spec, dtype, 0.0, learn)


class _Affine(NamedTuple):
    """A norm in float64: the normalised input is scale x + shift. Each `[C]`."""

    mean: np.ndarray
    inverse_deviation: np.ndarray
    scale: np.ndarray
    shift: np.ndarray


def _affine(norm: Norm, eps: float) -> _Affine:
    weight = torch.ones_like(norm.mean) if norm.weight is None else norm.weight
    bias = torch.zeros_like(norm.mean) if norm.bias is None else norm.bias
    # Copies, because memory that numpy has seen stays where it is: that of gathered weights comes and goes.
    copies = torch.stack([each.detach() for each in (norm.mean, norm.variance, weight, bias)])
    mean, variance, factor, addend = copies.to(torch.float64).numpy()
    inverse = 1.0 / np.sqrt(variance + eps)
    scale = inverse * factor
    return _Affine(mean, inverse, scale, addend - mean * scale)


def _tiles(length: int, dtype: np.dtype, *values: np.ndarray) -> np.ndarray:
    """Each of `values [C]` repeated, as `np.tile` gives it, which takes several times longer for so few."""
    channels = len(values[0])
    tiled = empty_array((len(values), length // channels, channels), dtype)
    tiled[:] = np.stack(values)[:, None]
    return tiled.reshape(len(values), length)


def _pixels(x: Tensor) -> np.ndarray:
    """`[T, N, C, ...]` as a contiguous array `[T, N, ..., C]`, without a copy where the memory is channels-last."""
    x = x.detach().movedim(2, -1)
    return (x.float() if x.dtype in REDUCED else x).contiguous().numpy()


def pieces(whole: int, size: int) -> int:
    """Pieces of that size that make up the whole; the last may be shorter."""
    return -(-whole // size)


def fire_alone(
    x: Tensor, v0: Tensor | None, w: Tensor | None, spec: NeuronSpec, packed: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `megasnn.kernels.neuron.neuron_by`."""
    data, first = _rows(x), _potential(v0, x, spec.rest)
    spikes, last = empty_array(data.shape, data.dtype), np.empty_like(first)
    whole_bytes = packed and data.shape[1] % 8 == 0
    bits = empty_array((data.size // 8,), np.dtype(np.uint8)) if whole_bytes else no_bits()
    p = constants_of(spec, data.dtype, w, learn=False)
    run_kernel(
        loops.fire_block, pieces(data.shape[1], _ROW_BLOCK), data, None, first, last, spikes, bits, p, _ROW_BLOCK
    )
    result = torch.from_numpy(spikes).view(x.shape).to(x.dtype)
    return result, torch.from_numpy(last).view(x.shape[1:]), torch.from_numpy(bits) if whole_bytes else None


def backward_alone(
    x: Tensor,
    v0: Tensor | None,
    g_spikes: Tensor,
    g_last: Tensor | None,
    w: Tensor | None,
    spec: NeuronSpec,
    learn: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    data, first, g_v = _rows(x), _potential(v0, x, spec.rest), _potential(g_last, x, 0.0).copy()
    g_x, sums = empty_array(data.shape, data.dtype), np.empty((pieces(data.shape[1], _ROW_BLOCK), 3, 1))
    p = constants_of(spec, data.dtype, w, learn)
    run_kernel(loops.block_backward, len(sums), data, None, first, _rows(g_spikes), g_v, g_x, sums, 1, _ROW_BLOCK, 1, p)
    result = torch.from_numpy(g_x).view(x.shape).to(x.dtype)
    return result, torch.from_numpy(g_v).view(x.shape[1:]), torch.from_numpy(sums[:, 2]).sum() if learn else None


def _rows(x: Tensor) -> np.ndarray:
    """`[T, M]` in the type that is computed in."""
    return (x.float() if x.dtype in REDUCED else x).view(len(x), -1).numpy()


def _potential(v: Tensor | None, x: Tensor, otherwise: float) -> np.ndarray:
    """`[1, M]`, for an input x."""
    dtype = torch.float32 if x.dtype in REDUCED else x.dtype
    return (torch.full_like(x[0], otherwise, dtype=dtype) if v is None else v.to(dtype)).view(1, -1).numpy()
