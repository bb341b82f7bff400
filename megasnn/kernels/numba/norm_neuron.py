"""Norm, pooling and neurons by compiled loops on the CPU."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from megasnn.kernels.layout import empty_array
from megasnn.kernels.neuron_spec import NeuronSpec
from megasnn.kernels.norm_neuron_kernels import (
    BackwardSums,
    BatchNorm,
    NormNeuron,
    NormNeuronInput,
    NormNeuronKernels,
    Statistics,
)
from megasnn.kernels.numba import loops, pool
from megasnn.kernels.numba.coefficients import fold_slices, norm_coefficients
from megasnn.kernels.numba.jit import run_kernel
from megasnn.kernels.numba.step import Constants, constants
from megasnn.kernels.spike_codec import pack_bits
from megasnn.kernels.torch_backend import REDUCED

_ROW = 512  # elements summed side by side, rounded up to whole pixels
_ROWS = 32  # rows of a slice of sums: short enough for float32, long enough that folding costs nothing
_BLOCK = 8  # rows of a block of neurons, whose gradients are summed side by side


class NumbaNormNeuron(NormNeuronKernels[np.ndarray]):
    """Kernels for a CPU. Coefficients: scale, shift, mean and 1 / deviation, in float64."""

    # `backward_sums` hands on the normalised input's gradient: computing it again takes longer than reading it.

    def __init__(self, shape: torch.Size, dtype: torch.dtype, norm_neuron: NormNeuron) -> None:
        super().__init__(shape, dtype, norm_neuron)
        input_steps, self._samples, channels, *sides = shape
        self._input_steps = input_steps
        self._width = channels * -(-_ROW // channels)  # values of a row
        self._space = norm_neuron.space_of_spikes(sides)
        self._spikes_shape = (norm_neuron.time_steps, self._samples, *self._space, channels)
        self._length = _BLOCK * self._width  # values of a block of neurons
        if norm_neuron.pool:
            self._length = self._space[1] * channels

    def statistics(self, x: Tensor, norm: BatchNorm | None = None) -> Statistics:
        data = pixels_of(x)
        channels = self.channels
        slice_pixels = _ROWS * self._width // channels
        slices = -(-self.values_per_channel // slice_pixels)
        means = np.empty((slices, channels))
        squares = np.empty((slices, channels))
        run_kernel(loops.slice_statistics, slices, data.reshape(-1), channels, self._width, _ROWS, means, squares)
        merged = np.empty((2, channels))
        run_kernel(loops.merge, 1, means, squares, slice_pixels, self.values_per_channel, merged)
        moments = torch.from_numpy(merged)
        if norm is None:
            return Statistics(moments)
        mean, variance = moments.unbind()
        return Statistics(moments, self.coefficients(mean, variance, norm))

    def coefficients(self, mean: Tensor, variance: Tensor, norm: BatchNorm) -> Tensor:
        # Copies, because memory that numpy has seen cannot be freed for a while: gathered weights come and go.
        if norm.weight is None:
            weight = np.ones(self.channels)
        else:
            weight = norm.weight.detach().to(torch.float64, copy=True).numpy()
        if norm.bias is None:
            bias = np.zeros(self.channels)
        else:
            bias = norm.bias.detach().to(torch.float64, copy=True).numpy()
        found = np.empty((4, self.channels))
        norm_coefficients(mean.numpy(), variance.numpy(), weight, bias, self.norm_neuron.eps, found)
        return torch.from_numpy(found)

    def fire(self, inputs: NormNeuronInput, packed: bool = False) -> tuple[Tensor, Tensor | None]:
        x = inputs.x
        norm_neuron = self.norm_neuron
        length = self._length
        data = pixels_of(x)
        out = empty_array(self._spikes_shape, data.dtype)
        flat = out.reshape(norm_neuron.time_steps, -1)
        p = constants_of(norm_neuron.spec, data.dtype, inputs.w, learn=False)
        # Every block and every time step must begin at a whole byte.
        bits = bits_for(flat, packed and length % 8 == 0)
        coefficients = self._coefficients_of(inputs)
        if norm_neuron.pool:
            windows = self._samples * self._space[0]
            run_kernel(pool.fire_pooled, windows, data, norm_neuron.above, coefficients, flat, bits, p, length)
        else:
            rows = data.reshape(self._input_steps, -1)
            blocks = -(-flat.shape[1] // length)
            run_kernel(loops.fire_block, blocks, rows, coefficients, None, None, flat, bits, p, length)
        spikes = torch.from_numpy(out).movedim(-1, 2).to(x.dtype)
        if not packed:
            return spikes, None
        return spikes, torch.from_numpy(bits) if bits.size else pack_bits(spikes)

    def backward_sums(
        self, inputs: NormNeuronInput, g_spikes: Tensor, learn: bool, count: int | None = None
    ) -> BackwardSums[np.ndarray]:
        x = inputs.x
        norm_neuron = self.norm_neuron
        channels = self.channels
        length = self._length
        data = pixels_of(x)
        flat = pixels_of(g_spikes).reshape(norm_neuron.time_steps, -1)
        g = empty_array(data.shape, data.dtype)
        p = constants_of(norm_neuron.spec, data.dtype, inputs.w, learn)
        coefficients = self._coefficients_of(inputs)
        if norm_neuron.pool:
            sums = np.empty((self._samples, 3, channels))
            run_kernel(
                pool.pooled_backward, self._samples,
                data, norm_neuron.above, flat, coefficients, g, sums, p, length,
            )  # fmt: skip
        else:
            slices = -(-flat.shape[1] // (self._width * _ROWS))
            sums = np.empty((slices, 3, channels))
            rows = data.reshape(self._input_steps, -1)
            g_rows = g.reshape(self._input_steps, -1)
            blocks = _ROWS // _BLOCK
            run_kernel(
                loops.block_backward, slices,
                rows, coefficients, None, flat, None, g_rows, sums, channels, length, blocks, p,
            )  # fmt: skip
        total = np.empty((3, channels))
        weight_gradient = np.empty(channels)
        bias_gradient = np.empty(channels)
        fold_slices(sums, coefficients, total, weight_gradient, bias_gradient)
        g_weight = None if inputs.weight is None else torch.from_numpy(weight_gradient).to(inputs.weight.dtype)
        g_bias = None if inputs.bias is None else torch.from_numpy(bias_gradient).to(inputs.bias.dtype)
        return BackwardSums(torch.from_numpy(total), g, g_weight, g_bias)

    def input_gradient(
        self, inputs: NormNeuronInput, g_spikes: Tensor, sums: Tensor | None, count: int, intermediate: np.ndarray
    ) -> Tensor:
        data = pixels_of(inputs.x)
        coefficients = self._coefficients_of(inputs)
        width = self._width
        all_sums = np.zeros((3, self.channels)) if sums is None else sums.numpy()
        slice_size = _ROWS * width
        slices = -(-data.size // slice_size)
        rows = data.reshape(1, -1)
        g_rows = intermediate.reshape(1, -1)
        run_kernel(loops.norm_input_gradient, slices, rows, g_rows, coefficients, all_sums, count, width, slice_size)
        return torch.from_numpy(intermediate).movedim(-1, 2).to(inputs.x.dtype)

    def _coefficients_of(self, inputs: NormNeuronInput) -> np.ndarray:
        coefficients = inputs.coefficients
        if coefficients is None:
            coefficients = self.coefficients(inputs.mean, inputs.variance, BatchNorm(inputs.weight, inputs.bias))
        return coefficients.numpy()


def bits_for(spikes: np.ndarray, packed: bool) -> np.ndarray:
    """Memory for bits of spikes `[T, M]`; empty if not wanted, or a step does not fill whole bytes."""
    if packed and spikes.shape[1] % 8 == 0:
        return empty_array((spikes.size // 8,), np.dtype(np.uint8))
    return np.empty(0, np.uint8)


def constants_of(spec: NeuronSpec, dtype: np.dtype, w: Tensor | None, learn: bool) -> Constants:
    """A described neuron's constants, with the charging factor sigmoid(w) if there is a w."""
    if w is None:
        return _fixed_constants(spec, dtype, 0.0, learn)
    number = torch.float64 if dtype == np.float64 else torch.float32
    return constants(spec, dtype, float(torch.sigmoid(w.detach().to(number))), learn)


_fixed_constants = cache(constants)


def pixels_of(x: Tensor) -> np.ndarray:
    """`[T, N, C, ...]` as a contiguous array `[T, N, ..., C]`, without a copy if channels-last."""
    x = x.detach().movedim(2, -1)
    return (x.float() if x.dtype in REDUCED else x).contiguous().numpy()
