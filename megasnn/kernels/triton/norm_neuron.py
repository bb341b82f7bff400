"""Norm, pooling and neurons by Triton kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megasnn.kernels.norm_neuron_kernels import (
    BackwardSums,
    BatchNorm,
    NormNeuron,
    NormNeuronInput,
    NormNeuronKernels,
    Statistics,
)
from megasnn.kernels.spike_codec import pack_bits
from megasnn.kernels.triton.launch import learned_factor
from megasnn.kernels.triton.norm_neuron_launches import (
    NormNeuronLaunches,
    StatisticsLaunches,
    coefficients_launch,
    mean_gradients_launch,
)


class TritonIntermediate(NamedTuple):
    """Results of `backward_sums` for `input_gradient`.

    Attributes:
        g_pooled, taps: with pooling, the windows' gradients and winning places, each `[X, size]`.
        mean_gradients: `[2, C]`, where the sums were complete.
    """

    g_pooled: Tensor | None
    taps: Tensor | None
    mean_gradients: Tensor | None


class TritonNormNeuron(NormNeuronKernels[TritonIntermediate]):
    def __init__(self, shape: torch.Size, dtype: torch.dtype, norm_neuron: NormNeuron) -> None:
        super().__init__(shape, dtype, norm_neuron)
        self._statistics_launches = StatisticsLaunches(shape, dtype, norm_neuron.eps)
        self._launches = NormNeuronLaunches(shape, dtype, norm_neuron)

    def statistics(self, x: Tensor, norm: BatchNorm | None = None) -> Statistics:
        launches = self._statistics_launches
        partial = x.new_empty(launches.partial_shape, dtype=launches.compute_dtype)
        launches.sums(x, partial)
        moments = x.new_empty((2, self.channels), dtype=torch.float64)
        if norm is None:
            launches.fold(partial, moments, None, None, None)
            return Statistics(moments)
        # The same launch gives the coefficients, because no other rank adds to the statistics.
        coefficients = x.new_empty((3, self.channels), dtype=launches.compute_dtype)
        launches.fold(partial, moments, norm.weight, norm.bias, coefficients)
        return Statistics(moments, coefficients)

    def coefficients(self, mean: Tensor, variance: Tensor, norm: BatchNorm) -> Tensor:
        out = mean.new_empty((3, self.channels), dtype=self._launches.compute_dtype)
        launch = coefficients_launch(self.channels, self.norm_neuron.eps)
        launch(mean, variance, norm.weight, norm.bias, out)
        return out

    def fire(self, inputs: NormNeuronInput, packed: bool = False) -> tuple[Tensor, Tensor | None]:
        x, mean, variance, weight, bias, w, coefficients = inputs
        launches = self._launches
        spikes = x.new_empty(launches.spikes_shape)
        bits = None
        if packed and launches.bytes_of_bits is not None:
            bits = x.new_empty(launches.bytes_of_bits, dtype=torch.uint8)
        if coefficients is None:
            coefficients = self.coefficients(mean, variance, BatchNorm(weight, bias))
        q = None if w is None else learned_factor(w, launches.compute_dtype)
        launches.fire(x, coefficients, None, q, spikes, bits, None)
        spikes = spikes.movedim(-1, 2)
        # Where a step does not fill whole bytes, spikes are packed by a kernel of their own.
        if packed and bits is None:
            bits = pack_bits(spikes)
        return spikes, bits

    def backward_sums(
        self, inputs: NormNeuronInput, g_spikes: Tensor, learn: bool, count: int | None = None
    ) -> BackwardSums[TritonIntermediate]:
        x, mean, variance, weight, bias, w, coefficients = inputs
        launches = self._launches
        g_pooled = None
        taps = None
        if self.norm_neuron.pool:
            g_pooled = x.new_empty((self.shape[0], launches.size))
            taps = torch.empty_like(g_pooled, dtype=torch.uint8)
        # Without a learned factor its sum is left out.
        kinds = 3 if learn else 2
        partial = x.new_empty((kinds, *launches.partial_shape), dtype=launches.compute_dtype)
        kept = None
        if launches.chunks_shape is not None:
            kept = x.new_empty(launches.chunks_shape, dtype=launches.compute_dtype)
        if coefficients is None:
            coefficients = self.coefficients(mean, variance, BatchNorm(weight, bias))
        q = None if w is None else learned_factor(w, launches.compute_dtype)
        launches.sums[learn](x, g_spikes, coefficients, q, g_pooled, taps, partial, kept)
        sums = x.new_empty((kinds, self.channels), dtype=torch.float64)
        g_weight = None if weight is None else torch.empty_like(weight)
        g_bias = None if bias is None else torch.empty_like(bias)
        mean_gradients = None
        if count is not None:
            mean_gradients = x.new_empty((2, self.channels), dtype=launches.compute_dtype)
        launches.fold[learn](partial, variance, sums, g_weight, g_bias, mean_gradients)
        return BackwardSums(sums, TritonIntermediate(g_pooled, taps, mean_gradients), g_weight, g_bias)

    def input_gradient(
        self,
        inputs: NormNeuronInput,
        g_spikes: Tensor,
        sums: Tensor | None,
        count: int,
        intermediate: TritonIntermediate,
    ) -> Tensor:
        x, mean, variance, weight, bias, w, coefficients = inputs
        launches = self._launches
        g_pooled, taps, mean_gradients = intermediate
        if sums is None:
            mean_gradients = None
        elif mean_gradients is None:
            mean_gradients = x.new_empty((2, self.channels), dtype=launches.compute_dtype)
            launch = mean_gradients_launch(self.channels, self.norm_neuron.eps, count)
            launch(sums, variance, mean_gradients)
        if coefficients is None:
            coefficients = self.coefficients(mean, variance, BatchNorm(weight, bias))
        # As dense as x, and in its order.
        g_x = torch.empty_like(x)
        if g_pooled is not None:
            launches.pooled_gradient(x, g_pooled, taps, g_x, coefficients, mean_gradients)
            return g_x
        kept = None
        if launches.chunks_shape is not None:
            kept = x.new_empty(launches.chunks_shape, dtype=launches.compute_dtype)
        q = None if w is None else learned_factor(w, launches.compute_dtype)
        launches.gradient(x, g_spikes, g_x, coefficients, mean_gradients, None, None, None, q, None, kept)
        return g_x
