"""Arithmetic on tensors: neurons and the norm before them, packing of spikes into bits, convolution, pooling.

Which neurons, surrogates and backends there are is told by tables that need no torch; the functions are in `neuron`,
`unit`, `spike_codec`, `convolution`, `products` and `philox`. Activations are ``[T, N, C, ...]``; the memory order that
the kernels take without a copy is channels-last.
"""

from megasnn.kernels.backends import BACKENDS
from megasnn.kernels.neuron_spec import NEURONS, SURROGATES, NeuronSpec, Surrogate

__all__ = ["BACKENDS", "NEURONS", "SURROGATES", "NeuronSpec", "Surrogate"]
