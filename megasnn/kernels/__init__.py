"""The inside of a conv-norm-(pool-)neuron unit, and the packing of spikes into bits.

``backend`` is "torch" (the plain reference), "fused" (compiled CPU kernels), or "auto": fused where it can be used.
Activations are ``[T, N, C, ...]``; the memory order that the kernels take without a copy is channels-last.
"""

from __future__ import annotations

from megasnn.kernels.codec import pack_bits, pack_counts, unpack_bits, unpack_bits_into, unpack_counts
from megasnn.kernels.spec import NEURON_KINDS, SURROGATES, NeuronSpec
from megasnn.kernels.unit import BACKENDS, neuron_multi_step, norm_pool_neuron

__all__ = [
    "BACKENDS",
    "NEURON_KINDS",
    "SURROGATES",
    "NeuronSpec",
    "neuron_multi_step",
    "norm_pool_neuron",
    "pack_bits",
    "pack_counts",
    "unpack_bits",
    "unpack_bits_into",
    "unpack_counts",
]
