"""Arithmetic on tensors: neurons and the norm before them, packing of spikes into bits, convolution, pooling.

The tables of neurons, surrogates and backends need no torch. The functions are in `neuron`, `norm_neuron`,
`spike_codec`, `convolution`, `products` and `philox`. Activations are ``[T, N, C, ...]``; kernels take channels-last
memory without a copy.
"""

from megasnn.kernels.backends import BACKENDS
from megasnn.kernels.neuron_spec import NEURONS, SURROGATES, NeuronSpec, Surrogate

__all__ = ["BACKENDS", "NEURONS", "SURROGATES", "NeuronSpec", "Surrogate"]
