"""Norm, pooling and neurons, and neurons without a norm, by Triton kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megasnn.kernels.compiled_neuron import CompiledKernels
from megasnn.kernels.norm_neuron_kernels import (
    Affine,
    BackwardSums,
    NeuronInput,
    Norm,
    NormNeuronInput,
    ParameterGradients,
    Statistics,
)
from megasnn.kernels.spike_codec import pack_bits
from megasnn.kernels.triton.launch import chunk_memory, compute_type
from megasnn.kernels.triton.norm_neuron_launches import (
    coefficients_launch,
    mean_gradients_launch,
    neuron_launches,
    norm_neuron_launches,
    statistics_launches,
)


class PooledGradients(NamedTuple):
    """The pooling windows' gradients and winning places, each `[X, size]`."""

    values: Tensor
    taps: Tensor


class TritonIntermediate(NamedTuple):
    """Results of `backward_sums` for `input_gradient`.

    Attributes:
        pooled: with pooling.
        mean_gradients: `[2, C]`, where the sums were complete.
    """

    pooled: PooledGradients | None
    mean_gradients: Tensor | None


class TritonKernels(CompiledKernels[TritonIntermediate]):
    def statistics(self, x: Tensor, affine: Affine | None = None) -> Statistics:
        channels = x.shape[2]
        eps = 0.0 if affine is None else affine.eps
        launches = statistics_launches(x.shape, x.dtype, eps)
        partial = x.new_empty(launches.partial_shape, dtype=launches.number)
        launches.sums(x, partial)
        values = x.new_empty((2, channels), dtype=torch.float64)
        if affine is None:
            launches.fold(partial, values, None, None, None)
            return Statistics(values)
        coefficients = x.new_empty((3, channels), dtype=launches.number)
        launches.fold(partial, values, affine.weight, affine.bias, coefficients)
        return Statistics(values, coefficients)

    def coefficients(self, norm: Norm, eps: float, dtype: torch.dtype) -> Tensor:
        (channels,) = norm.mean.shape
        out = norm.mean.new_empty((3, channels), dtype=compute_type(dtype))
        coefficients_launch(channels, eps)(norm.mean, norm.variance, norm.weight, norm.bias, out)
        return out

    def fire(self, inputs: NormNeuronInput, packed: bool = False) -> tuple[Tensor, Tensor | None]:
        x, norm, w, norm_neuron = inputs
        launches = norm_neuron_launches(x.shape, x.dtype, norm_neuron)
        spikes = x.new_empty(launches.spikes_shape)
        bits = None
        if packed and launches.size % 8 == 0:
            bits = x.new_empty((norm_neuron.time_steps * launches.size // 8,), dtype=torch.uint8)
        coefficients = self._coefficients_of(inputs)
        launches.fire(x, coefficients, None, factor(w, launches.number), spikes, bits, None)
        spikes = spikes.movedim(-1, 2)
        if packed and bits is None:
            bits = pack_bits(spikes)
        return spikes, bits

    def backward_sums(
        self, inputs: NormNeuronInput, g_spikes: Tensor, learn: bool, count: int | None = None
    ) -> BackwardSums[TritonIntermediate]:
        x, norm, w, norm_neuron = inputs
        launches = norm_neuron_launches(x.shape, x.dtype, norm_neuron)
        channels = launches.channels
        pooled = None
        g_pooled = None
        taps = None
        if norm_neuron.pool:
            g_pooled = x.new_empty((len(x), launches.size))
            taps = torch.empty_like(g_pooled, dtype=torch.uint8)
            pooled = PooledGradients(g_pooled, taps)
        kinds = 3 if learn else 2  # without a learned factor its sum is left out
        partial = x.new_empty((kinds, *launches.partial_shape), dtype=launches.number)
        kept = chunk_memory(x, norm_neuron.time_steps, launches.size)
        q = factor(w, launches.number)
        coefficients = self._coefficients_of(inputs)
        sums_launch = launches.learning_sums if learn else launches.sums
        sums_launch(x, g_spikes, coefficients, q, g_pooled, taps, partial, kept)
        sums = x.new_empty((kinds, channels), dtype=torch.float64)
        g_weight = None if norm.weight is None else torch.empty_like(norm.weight)
        g_bias = None if norm.bias is None else torch.empty_like(norm.bias)
        mean_gradients = None
        if count is not None:
            mean_gradients = x.new_empty((2, channels), dtype=launches.number)
        fold = launches.fold_learning if learn else launches.fold
        fold(partial, norm.variance, sums, g_weight, g_bias, mean_gradients)
        return BackwardSums(sums, TritonIntermediate(pooled, mean_gradients), ParameterGradients(g_weight, g_bias))

    def input_gradient(
        self,
        inputs: NormNeuronInput,
        g_spikes: Tensor,
        sums: Tensor | None,
        count: int,
        intermediate: TritonIntermediate,
    ) -> Tensor:
        x, norm, w, norm_neuron = inputs
        launches = norm_neuron_launches(x.shape, x.dtype, norm_neuron)
        pooled, mean_gradients = intermediate
        if sums is None:
            mean_gradients = None
        elif mean_gradients is None:
            mean_gradients = x.new_empty((2, launches.channels), dtype=launches.number)
            mean_gradients_launch(launches.channels, norm_neuron.eps, count)(sums, norm.variance, mean_gradients)
        coefficients = self._coefficients_of(inputs)
        g_x = torch.empty_like(x)  # as dense as x, and in its order
        if pooled is not None:
            launches.pooled_gradient(x, *pooled, g_x, coefficients, mean_gradients)
            return g_x
        kept = chunk_memory(x, norm_neuron.time_steps, launches.size)
        q = factor(w, launches.number)
        launches.gradient(x, g_spikes, g_x, coefficients, mean_gradients, None, None, None, q, None, kept)
        return g_x

    def _coefficients_of(self, inputs: NormNeuronInput) -> Tensor:
        norm = inputs.norm
        if norm.coefficients is not None:
            return norm.coefficients
        return self.coefficients(norm, inputs.norm_neuron.eps, inputs.x.dtype)

    def fire_alone(self, inputs: NeuronInput, packed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        x, v0, w, spec = inputs
        launches = neuron_launches(x.shape, x.dtype, spec)
        spikes = torch.empty_like(x)
        last = torch.empty_like(x[0], dtype=launches.number)
        bits = None
        if packed and launches.size % 8 == 0:
            bits = x.new_empty(spikes.numel() // 8, dtype=torch.uint8)
        launches.fire(x, None, v0, factor(w, launches.number), spikes, bits, last)
        return spikes, last, bits

    def backward_alone(
        self, inputs: NeuronInput, g_spikes: Tensor, g_last: Tensor | None, learn: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, v0, w, spec = inputs
        launches = neuron_launches(x.shape, x.dtype, spec)
        g_x = torch.empty_like(x)
        g_first = None if v0 is None else torch.empty_like(x[0], dtype=launches.number)
        totals = x.new_empty(launches.programs, dtype=torch.float64) if learn else None
        kept = chunk_memory(x, len(x), launches.size)
        q = factor(w, launches.number)
        launches.gradient(x, g_spikes, g_x, None, None, v0, g_last, g_first, q, totals, kept)
        return g_x, g_first, None if totals is None else totals.sum()


def factor(w: Tensor | None, number: torch.dtype) -> Tensor | None:
    """The charge's learned factor, or None; it stays on the device."""
    return None if w is None else w.detach().to(number).sigmoid()
