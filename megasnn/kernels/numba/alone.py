"""A layer of neurons without a norm before it, with a potential that may come from the call before."""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

from megasnn.kernels.layout import empty_array
from megasnn.kernels.neuron import neuron_by
from megasnn.kernels.neuron_spec import NeuronSpec
from megasnn.kernels.numba.calls import constants_of, no_bits, pieces
from megasnn.kernels.numba.jit import kernel, part, run
from megasnn.kernels.numba.row import LANES, back, fire
from megasnn.kernels.torch_backend import REDUCED

_BLOCK = 1024  # elements: with the potentials of 4 to 10 steps they stay in the L1 cache


def neuron_multi_step(x: Tensor, spec: NeuronSpec, v0: Tensor | None, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """See :func:`megasnn.kernels.neuron.neuron_multi_step`."""
    return neuron_by(sys.modules[__name__], x, spec, v0, w)


@kernel
def fire_steps(x, v_first, spikes, v_last, bits, p, width, first, last):
    """`x, spikes [T, M]`; `v_first, v_last [1, M]`; `bits` as in `row.fire`; a unit of work is one block."""
    for block in range(first, last):
        low = block * width
        fire(x, low, None, v_first, v_last, spikes, low, min(width, x.shape[1] - low), bits, p)


@kernel
def steps_backward(x, v_first, g_spikes, g_v, g_x, totals, p, width, first, last):
    """`g_v [1, M]`: gradient of the last potential before, that of the first after; `totals [blocks]`."""
    scratch, sums = np.empty((2 * x.shape[0], LANES), x.dtype), np.empty((3, width), x.dtype)
    for block in range(first, last):
        low = block * width
        sums[:] = p.zero
        back(x, low, None, v_first, g_spikes, low, min(width, x.shape[1] - low), g_v, g_x, sums, p, scratch)
        totals[block] = sum_all(sums[2])


@part
def sum_all(values):
    result = 0.0
    for j in range(values.size):
        result += values[j]
    return result


def fire_alone(
    x: Tensor, v0: Tensor | None, w: Tensor | None, spec: NeuronSpec, packed: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `megasnn.kernels.neuron.neuron_by`."""
    data, first = _rows(x), _potential(v0, x, spec.rest)
    spikes, last = empty_array(data.shape, data.dtype), np.empty_like(first)
    whole_bytes = packed and data.shape[1] % 8 == 0
    bits = empty_array((data.size // 8,), np.dtype(np.uint8)) if whole_bytes else no_bits()
    p = constants_of(spec, data.dtype, w, learn=False)
    run(fire_steps, pieces(data.shape[1], _BLOCK), data, first, spikes, last, bits, p, _BLOCK)
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
    g_x, totals = empty_array(data.shape, data.dtype), np.empty(pieces(data.shape[1], _BLOCK))
    p = constants_of(spec, data.dtype, w, learn)
    run(steps_backward, len(totals), data, first, _rows(g_spikes), g_v, g_x, totals, p, _BLOCK)
    given = torch.from_numpy(g_x).view(x.shape).to(x.dtype)
    return given, torch.from_numpy(g_v).view(x.shape[1:]), torch.from_numpy(totals).sum() if learn else None


def _rows(x: Tensor) -> np.ndarray:
    """`[T, M]` in the type that is computed in."""
    return (x.float() if x.dtype in REDUCED else x).view(len(x), -1).numpy()


def _potential(v: Tensor | None, x: Tensor, otherwise: float) -> np.ndarray:
    """`[1, M]`, for an input x."""
    dtype = torch.float32 if x.dtype in REDUCED else x.dtype
    return (torch.full_like(x[0], otherwise, dtype=dtype) if v is None else v.to(dtype)).view(1, -1).numpy()
