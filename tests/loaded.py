"""Imports and libraries that a server loads once for all processes forked from it (tests/forking.py).

A rank that imports numba and loads the machine code of the kernels by itself is busy for a second with that.
"""

from __future__ import annotations

import gc

import torch
import tyro  # noqa: F401  (as flags are read)

import megasnn.training  # noqa: F401
from megasnn.kernels import NeuronSpec
from megasnn.kernels.norm_neuron_kernels import NormNeuron, NormNeuronInput
from megasnn.kernels.numba.norm_neuron import NumbaNormNeuron
from megasnn.kernels.products import Products
from megasnn.kernels.spike_codec import pack_bits, unpack_bits_into
from tests.sums import form_sums_where_few


def _load_kernels(dtype: torch.dtype) -> None:
    """Runs each kernel of training once. Without autograd, which beside a GPU has threads that survive no fork."""
    for pool in (False, True):
        x, of_channels = torch.ones(1, 1, 2, 2, 2, dtype=dtype), torch.ones(2, dtype=dtype)
        x, neuron = x.movedim(2, -1).contiguous().movedim(-1, 2), NormNeuron(NeuronSpec(), 1e-5, pool, 1)
        kernels = NumbaNormNeuron(x.shape, dtype, neuron)
        norm = (*kernels.statistics(x).moments, of_channels, of_channels)
        inputs = NormNeuronInput(x, *norm)
        spikes, _ = kernels.fire(inputs)
        backward = kernels.backward_sums(inputs, spikes, False)
        kernels.input_gradient(inputs, spikes, backward.sums, 4, backward.intermediate)
        unpack_bits_into(pack_bits(spikes), spikes.movedim(2, -1).view(1, -1))
    images, weight, products = torch.ones(1, 8, 1, 1), torch.zeros(8, 8, 1, 1), Products(sparse=True)
    images[:, 1:] = 0
    images, weight = images.to(dtype), weight.to(dtype)
    products.add_weight_gradient(weight, products.convolve(images, weight), images)


form_sums_where_few()
for _dtype in (torch.float32, torch.float64):
    _load_kernels(_dtype)

# Nothing of this is looked through for garbage in the processes that are forked, nor copied for that.
gc.collect()
gc.freeze()
