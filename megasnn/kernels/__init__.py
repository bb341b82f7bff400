"""Tensor arithmetic: neurons and the norm before them, spike packing, convolution, pooling.

The tables (neurons, surrogates, backends) need no torch. Activations are ``[T, N, C, ...]``; kernels take
channels-last memory without a copy.
"""

from megasnn.kernels.backends import BACKENDS
from megasnn.kernels.neuron_spec import NEURONS, SURROGATES, NeuronSpec, Surrogate

__all__ = ["BACKENDS", "NEURONS", "SURROGATES", "NeuronSpec", "Surrogate"]
