"""Neurons without a norm by Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from megasnn.kernels.compiled_neuron import CompiledNeuron
from megasnn.kernels.neuron_spec import NEURONS, NeuronSpec
from megasnn.kernels.norm_neuron_kernels import NeuronInput, NeuronKernels
from megasnn.kernels.triton.bispike import TritonBiSpike
from megasnn.kernels.triton.launch import learned_factor
from megasnn.kernels.triton.norm_neuron_launches import NeuronLaunches


class TritonNeuron(CompiledNeuron):
    def __init__(self, shape: torch.Size, dtype: torch.dtype, spec: NeuronSpec) -> None:
        super().__init__(shape, dtype, spec)
        self._launches = NeuronLaunches(shape, dtype, spec)

    def fire(self, inputs: NeuronInput, packed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        x, v0, w = inputs
        launches = self._launches
        spikes = torch.empty_like(x)
        last = torch.empty_like(x[0], dtype=launches.compute_dtype)
        bits = None
        if packed and launches.bytes_of_bits is not None:
            bits = x.new_empty(launches.bytes_of_bits, dtype=torch.uint8)
        q = None if w is None else learned_factor(w, launches.compute_dtype)
        launches.fire(x, None, v0, q, spikes, bits, last)
        return spikes, last, bits

    def backward(
        self, inputs: NeuronInput, g_spikes: Tensor, g_last: Tensor | None, learn: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, v0, w = inputs
        launches = self._launches
        g_x = torch.empty_like(x)
        g_first = None if v0 is None else torch.empty_like(x[0], dtype=launches.compute_dtype)
        totals = x.new_empty(launches.programs, dtype=torch.float64) if learn else None
        kept = None
        if launches.chunks_shape is not None:
            kept = x.new_empty(launches.chunks_shape, dtype=launches.compute_dtype)
        q = None if w is None else learned_factor(w, launches.compute_dtype)
        launches.gradient(x, g_spikes, g_x, None, None, v0, g_last, g_first, q, totals, kept)
        return g_x, g_first, None if totals is None else totals.sum()


def triton_neuron_kernels(shape: torch.Size, dtype: torch.dtype, spec: NeuronSpec) -> NeuronKernels:
    return (TritonBiSpike if NEURONS[spec.kind].ternary else TritonNeuron)(shape, dtype, spec)
