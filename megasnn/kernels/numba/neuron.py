"""Neurons without a norm by compiled loops on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megasnn.kernels.compiled_neuron import CompiledNeuron
from megasnn.kernels.layout import empty_array
from megasnn.kernels.neuron_spec import NEURONS, NeuronSpec
from megasnn.kernels.norm_neuron_kernels import NeuronInput, NeuronKernels
from megasnn.kernels.numba import loops
from megasnn.kernels.numba.bispike import NumbaBiSpike
from megasnn.kernels.numba.jit import run_kernel
from megasnn.kernels.numba.norm_neuron import bits_for, constants_of
from megasnn.kernels.torch_backend import REDUCED

# A block of neurons runs all time steps before the next block starts, so potentials never reach memory.
_ROW_BLOCK = 1024  # elements: with the potentials of 4 to 10 steps they stay in the L1 cache


class NumbaNeuron(CompiledNeuron):
    def fire(self, inputs: NeuronInput, packed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        x, v0, w = inputs
        spec = self.spec
        data = _rows(x)
        first = _potential(v0, x, spec.rest)
        spikes = empty_array(data.shape, data.dtype)
        last = np.empty_like(first)
        bits = bits_for(spikes, packed)
        p = constants_of(spec, data.dtype, w, learn=False)
        blocks = -(-data.shape[1] // _ROW_BLOCK)
        run_kernel(loops.fire_block, blocks, data, None, first, last, spikes, bits, p, _ROW_BLOCK)
        fired = torch.from_numpy(spikes).view(x.shape).to(x.dtype)
        return fired, torch.from_numpy(last).view(x.shape[1:]), torch.from_numpy(bits) if bits.size else None

    def backward(
        self, inputs: NeuronInput, g_spikes: Tensor, g_last: Tensor | None, learn: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, v0, w = inputs
        spec = self.spec
        data = _rows(x)
        upstream = _rows(g_spikes)
        first = _potential(v0, x, spec.rest)
        # A copy, because the loops write the first potential's gradient over it.
        g_v = _potential(g_last, x, 0.0).copy()
        g_x = empty_array(data.shape, data.dtype)
        blocks = -(-data.shape[1] // _ROW_BLOCK)
        # A place for each block: the sum does not depend on which thread ends first.
        sums = np.empty((blocks, 3, 1))
        p = constants_of(spec, data.dtype, w, learn)
        run_kernel(loops.block_backward, blocks, data, None, first, upstream, g_v, g_x, sums, 1, _ROW_BLOCK, 1, p)
        total = torch.from_numpy(sums[:, 2]).sum() if learn else None
        return torch.from_numpy(g_x).view(x.shape).to(x.dtype), torch.from_numpy(g_v).view(x.shape[1:]), total


def numba_neuron_kernels(shape: torch.Size, dtype: torch.dtype, spec: NeuronSpec) -> NeuronKernels:
    return (NumbaBiSpike if NEURONS[spec.kind].ternary else NumbaNeuron)(shape, dtype, spec)


def _rows(x: Tensor) -> np.ndarray:
    """`[T, M]` in the arithmetic's type."""
    return (x.float() if x.dtype in REDUCED else x).view(len(x), -1).numpy()


def _potential(v: Tensor | None, x: Tensor, otherwise: float) -> np.ndarray:
    """A potential `[1, M]` for an input x, in the arithmetic's type."""
    dtype = torch.float32 if x.dtype in REDUCED else x.dtype
    v = torch.full_like(x[0], otherwise, dtype=dtype) if v is None else v.to(dtype)
    return v.view(1, -1).numpy()
