"""A layer of neurons without a norm before it, with a potential that may come from the call before."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megasnn.kernels.layout import empty_array
from megasnn.kernels.neuron import neuron_by
from megasnn.kernels.neuron_spec import NeuronSpec
from megasnn.kernels.numba import unit as loops
from megasnn.kernels.numba.calls import constants_of, no_bits, pieces
from megasnn.kernels.numba.jit import run
from megasnn.kernels.torch_backend import REDUCED

_BLOCK = 1024  # elements: with the potentials of 4 to 10 steps they stay in the L1 cache


neuron_multi_step = partial(neuron_by, sys.modules[__name__])


def fire_alone(
    x: Tensor, v0: Tensor | None, w: Tensor | None, spec: NeuronSpec, packed: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `megasnn.kernels.neuron.neuron_by`."""
    data, first = _rows(x), _potential(v0, x, spec.rest)
    spikes, last = empty_array(data.shape, data.dtype), np.empty_like(first)
    whole_bytes = packed and data.shape[1] % 8 == 0
    bits = empty_array((data.size // 8,), np.dtype(np.uint8)) if whole_bytes else no_bits()
    p = constants_of(spec, data.dtype, w, learn=False)
    run(loops.fire_block, pieces(data.shape[1], _BLOCK), data, None, first, last, spikes, bits, p, _BLOCK)
    given = torch.from_numpy(spikes).view(x.shape).to(x.dtype)
    return given, torch.from_numpy(last).view(x.shape[1:]), torch.from_numpy(bits) if whole_bytes else None


def backward_alone(
    x: Tensor,
    v0: Tensor | None,
    g_spikes: Tensor,
    g_last: Tensor | None,
    w: Tensor | None,
    spec: NeuronSpec,
    learn: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    data, first, g_v = _rows(x), _potential(v0, x, spec.rest), _potential(g_last, x, 0.0).copy()
    g_x, sums = empty_array(data.shape, data.dtype), np.empty((pieces(data.shape[1], _BLOCK), 3, 1))
    p = constants_of(spec, data.dtype, w, learn)
    run(loops.block_backward, len(sums), data, None, first, _rows(g_spikes), g_v, g_x, sums, 1, _BLOCK, 1, p)
    given = torch.from_numpy(g_x).view(x.shape).to(x.dtype)
    return given, torch.from_numpy(g_v).view(x.shape[1:]), torch.from_numpy(sums[:, 2]).sum() if learn else None


def _rows(x: Tensor) -> np.ndarray:
    """`[T, M]` in the type that is computed in."""
    return (x.float() if x.dtype in REDUCED else x).view(len(x), -1).numpy()


def _potential(v: Tensor | None, x: Tensor, otherwise: float) -> np.ndarray:
    """`[1, M]`, for an input x."""
    dtype = torch.float32 if x.dtype in REDUCED else x.dtype
    return (torch.full_like(x[0], otherwise, dtype=dtype) if v is None else v.to(dtype)).view(1, -1).numpy()
