"""Norm, pooling and neurons, and neurons without a norm, by compiled loops on the CPU."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megasnn.kernels.compiled_neuron import CompiledKernels
from megasnn.kernels.layout import empty_array
from megasnn.kernels.neuron_spec import NeuronSpec
from megasnn.kernels.norm_neuron_kernels import Affine, BackwardSums, NeuronInput, Norm, NormNeuronInput, Statistics
from megasnn.kernels.numba import loops, pool
from megasnn.kernels.numba.jit import run_kernel
from megasnn.kernels.numba.step import Constants, constants
from megasnn.kernels.spike_codec import pack_bits
from megasnn.kernels.torch_backend import REDUCED

_ROW = 512  # elements summed side by side, rounded up to whole pixels
_ROWS = 32  # rows of a slice of sums: short enough for float32, long enough that folding costs nothing
_BLOCK = 8  # rows of a block of neurons, whose gradients are summed side by side
# A block of neurons runs all time steps before the next block starts, so potentials never reach memory.
_ROW_BLOCK = 1024  # elements: with the potentials of 4 to 10 steps they stay in the L1 cache


class NumbaKernels(CompiledKernels[np.ndarray]):
    """Carries the normalised input's gradient."""

    # Computing it again would take longer than reading it.

    def statistics(self, x: Tensor, affine: Affine | None = None) -> Statistics:
        data = _pixels(x)
        channels = data.shape[-1]
        width = channels * -(-_ROW // channels)
        pixels = data.size // channels
        slice_pixels = _ROWS * width // channels
        slices = -(-pixels // slice_pixels)
        means = np.empty((slices, channels))
        squares = np.empty((slices, channels))
        run_kernel(loops.slice_statistics, slices, data.reshape(-1), channels, width, _ROWS, means, squares)
        merged = np.empty((2, channels))
        run_kernel(loops.merge, 1, means, squares, slice_pixels, pixels, merged)
        return Statistics(torch.from_numpy(merged))

    def fire(self, inputs: NormNeuronInput, packed: bool = False) -> tuple[Tensor, Tensor | None]:
        x, norm, w, norm_neuron = inputs
        data = _pixels(x)
        input_steps, samples, *sides, channels = data.shape
        space = norm_neuron.space_of_spikes(sides)
        out = empty_array((norm_neuron.time_steps, samples, *space, channels), data.dtype)
        flat = out.reshape(norm_neuron.time_steps, -1)
        p = constants_of(norm_neuron.spec, data.dtype, w, learn=False)
        length = space[1] * channels if norm_neuron.pool else _BLOCK * channels * -(-_ROW // channels)
        # Every block and every time step must begin at a whole byte.
        bits = _bits_for(flat, packed and length % 8 == 0)
        affine = _affine(norm, norm_neuron.eps)
        coefficients = _tiles(length, data.dtype, affine.scale, affine.shift, affine.mean)
        if norm_neuron.pool:
            run_kernel(pool.fire_pooled, samples * space[0], data, norm_neuron.above, coefficients, flat, bits, p)
        else:
            rows = data.reshape(input_steps, -1)
            blocks = -(-flat.shape[1] // length)
            run_kernel(loops.fire_block, blocks, rows, coefficients, None, None, flat, bits, p, length)
        spikes = torch.from_numpy(out).movedim(-1, 2).to(x.dtype)
        if not packed:
            return spikes, None
        return spikes, torch.from_numpy(bits) if bits.size else pack_bits(spikes)

    def backward_sums(
        self, inputs: NormNeuronInput, g_spikes: Tensor, learn: bool, count: int | None = None
    ) -> BackwardSums[np.ndarray]:
        x, norm, w, norm_neuron = inputs
        data = _pixels(x)
        upstream = _pixels(g_spikes)
        input_steps, samples, *_, channels = data.shape
        flat = upstream.reshape(norm_neuron.time_steps, -1)
        g = empty_array(data.shape, data.dtype)
        p = constants_of(norm_neuron.spec, data.dtype, w, learn)
        width = channels * -(-_ROW // channels)
        length = upstream.shape[3] * channels if norm_neuron.pool else _BLOCK * width
        affine = _affine(norm, norm_neuron.eps)
        coefficients = _tiles(length, data.dtype, affine.scale, affine.shift, affine.mean)
        if norm_neuron.pool:
            sums = np.empty((samples, 3, channels))
            run_kernel(pool.pooled_backward, samples, data, norm_neuron.above, flat, coefficients, g, sums, p)
        else:
            slices = -(-flat.shape[1] // (width * _ROWS))
            sums = np.empty((slices, 3, channels))
            rows = data.reshape(input_steps, -1)
            g_rows = g.reshape(input_steps, -1)
            blocks = _ROWS // _BLOCK
            run_kernel(
                loops.block_backward, slices,
                rows, coefficients, None, flat, None, g_rows, sums, channels, length, blocks, p,
            )  # fmt: skip
        # The slices depend only on sizes, so the order of this sum does not depend on the number of threads.
        return BackwardSums(torch.from_numpy(sums.sum(axis=0)), intermediate=g, of_norm=None)

    def input_gradient(
        self, inputs: NormNeuronInput, g_spikes: Tensor, sums: Tensor | None, count: int, intermediate: np.ndarray
    ) -> Tensor:
        data = _pixels(inputs.x)
        channels = data.shape[-1]
        width = channels * -(-_ROW // channels)
        affine = _affine(inputs.norm, inputs.norm_neuron.eps)
        mean_g = np.zeros(channels)
        mean_per_deviation = np.zeros(channels)
        if sums is not None:
            mean_g = sums[0].numpy() / count
            mean_per_deviation = sums[1].numpy() * affine.inverse_deviation**2 / count
        coefficients = _tiles(width, data.dtype, affine.scale, affine.mean, mean_g, mean_per_deviation)
        slice_size = _ROWS * width
        slices = -(-data.size // slice_size)
        rows = data.reshape(1, -1)
        g_rows = intermediate.reshape(1, -1)
        run_kernel(loops.norm_input_gradient, slices, rows, g_rows, coefficients, slice_size)
        return torch.from_numpy(intermediate).movedim(-1, 2).to(inputs.x.dtype)

    def fire_alone(self, inputs: NeuronInput, packed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        x, v0, w, spec = inputs
        data = _rows(x)
        first = _potential(v0, x, spec.rest)
        spikes = empty_array(data.shape, data.dtype)
        last = np.empty_like(first)
        bits = _bits_for(spikes, packed)
        p = constants_of(spec, data.dtype, w, learn=False)
        blocks = -(-data.shape[1] // _ROW_BLOCK)
        run_kernel(loops.fire_block, blocks, data, None, first, last, spikes, bits, p, _ROW_BLOCK)
        fired = torch.from_numpy(spikes).view(x.shape).to(x.dtype)
        return fired, torch.from_numpy(last).view(x.shape[1:]), torch.from_numpy(bits) if bits.size else None

    def backward_alone(
        self, inputs: NeuronInput, g_spikes: Tensor, g_last: Tensor | None, learn: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, v0, w, spec = inputs
        data = _rows(x)
        upstream = _rows(g_spikes)
        first = _potential(v0, x, spec.rest)
        # A copy, because the loops write the first potential's gradient over it.
        g_v = _potential(g_last, x, 0.0).copy()
        g_x = empty_array(data.shape, data.dtype)
        blocks = -(-data.shape[1] // _ROW_BLOCK)
        sums = np.empty((blocks, 3, 1))
        p = constants_of(spec, data.dtype, w, learn)
        run_kernel(loops.block_backward, blocks, data, None, first, upstream, g_v, g_x, sums, 1, _ROW_BLOCK, 1, p)
        total = torch.from_numpy(sums[:, 2]).sum() if learn else None
        return torch.from_numpy(g_x).view(x.shape).to(x.dtype), torch.from_numpy(g_v).view(x.shape[1:]), total


def _bits_for(spikes: np.ndarray, packed: bool) -> np.ndarray:
    """Memory for bits of spikes `[T, M]`; empty if not wanted, or a step does not fill whole bytes."""
    if packed and spikes.shape[1] % 8 == 0:
        return empty_array((spikes.size // 8,), np.dtype(np.uint8))
    return np.empty(0, np.uint8)


def constants_of(spec: NeuronSpec, dtype: np.dtype, w: Tensor | None, learn: bool) -> Constants:
    """w: the learned charging factor is sigmoid(w)."""
    if w is None:
        return _fixed_constants(spec, dtype, learn)
    number = torch.float64 if dtype == np.float64 else torch.float32
    return constants(spec, dtype, float(torch.sigmoid(w.detach().to(number))), learn)


@cache
def _fixed_constants(spec: NeuronSpec, dtype: np.dtype, learn: bool) -> Constants:
    return constants(spec, dtype, 0.0, learn)


class _Affine(NamedTuple):
    """A norm as scale x + shift, in float64. Each is `[C]`."""

    mean: np.ndarray
    inverse_deviation: np.ndarray
    scale: np.ndarray
    shift: np.ndarray


def _affine(norm: Norm, eps: float) -> _Affine:
    weight = torch.ones_like(norm.mean) if norm.weight is None else norm.weight
    bias = torch.zeros_like(norm.mean) if norm.bias is None else norm.bias
    # Copies, because memory that numpy has seen cannot be freed for a while: gathered weights come and go.
    copies = torch.stack([each.detach() for each in (norm.mean, norm.variance, weight, bias)])
    mean, variance, factor, addend = copies.to(torch.float64).numpy()
    inverse = 1.0 / np.sqrt(variance + eps)
    scale = inverse * factor
    return _Affine(mean, inverse, scale, addend - mean * scale)


def _tiles(length: int, dtype: np.dtype, *values: np.ndarray) -> np.ndarray:
    """Repeats each of `values [C]`."""
    # np.tile takes several times longer for so few values.
    channels = len(values[0])
    tiled = empty_array((len(values), length // channels, channels), dtype)
    tiled[:] = np.stack(values)[:, None]
    return tiled.reshape(len(values), length)


def _pixels(x: Tensor) -> np.ndarray:
    """`[T, N, C, ...]` as a contiguous array `[T, N, ..., C]`, without a copy if channels-last."""
    x = x.detach().movedim(2, -1)
    return (x.float() if x.dtype in REDUCED else x).contiguous().numpy()


def _rows(x: Tensor) -> np.ndarray:
    """`[T, M]` in the arithmetic's type."""
    return (x.float() if x.dtype in REDUCED else x).view(len(x), -1).numpy()


def _potential(v: Tensor | None, x: Tensor, otherwise: float) -> np.ndarray:
    """A potential `[1, M]` for an input x, in the arithmetic's type."""
    dtype = torch.float32 if x.dtype in REDUCED else x.dtype
    v = torch.full_like(x[0], otherwise, dtype=dtype) if v is None else v.to(dtype)
    return v.view(1, -1).numpy()
