"""A layer of neurons without a norm before it, with a potential that may come from the call before."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megasnn.kernels.layout import empty_array, memory_order
from megasnn.kernels.neuron import gradient_of_w
from megasnn.kernels.neuron_spec import NeuronSpec
from megasnn.kernels.numba.calls import constants_of, no_bits, pieces
from megasnn.kernels.numba.jit import kernel, part, run
from megasnn.kernels.numba.row import LANES, back, fire
from megasnn.kernels.spike_codec import pack_bits, remember_bits, wants_bits
from megasnn.kernels.torch_backend import REDUCED

_BLOCK = 1024  # elements: with the potentials of 4 to 10 steps they stay in the L1 cache


def neuron_multi_step(x: Tensor, spec: NeuronSpec, v0: Tensor | None, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """See :func:`megasnn.kernels.neuron.neuron_multi_step`."""
    spikes, last, bits = _Neuron.apply(x, v0, w, spec, wants_bits(x))
    return remember_bits(spikes, bits), last


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


class _Neuron(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, v0: Tensor | None, w: Tensor | None, spec: NeuronSpec, packed: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        ctx.save_for_backward(x, v0, w)
        rows = _TimeRows(x)
        data = rows.take(x)
        first = rows.first(v0, spec)
        spikes, last = empty_array(data.shape, data.dtype), np.empty_like(first)
        p = constants_of(spec, data.dtype, w, learn=False)
        whole_bytes = packed and data.shape[1] % 8 == 0
        bits = empty_array((data.size // 8,), np.dtype(np.uint8)) if whole_bytes else no_bits()
        run(fire_steps, pieces(data.shape[1], _BLOCK), data, first, spikes, last, bits, p, _BLOCK)
        given, as_bits = rows.give(spikes), None
        if packed:
            as_bits = torch.from_numpy(bits) if whole_bytes else pack_bits(given)
            ctx.mark_non_differentiable(as_bits)
        return given.to(x.dtype), rows.give_step(last), as_bits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_spikes: Tensor | None, g_last: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        x, v0, w = ctx.saved_tensors
        need_x, need_v, need_w, *_ = ctx.needs_input_grad
        rows = _TimeRows(x)
        data = rows.take(x)
        first = rows.first(v0, ctx.spec)
        g = np.zeros_like(data) if g_spikes is None else rows.take(g_spikes)
        g_v = np.zeros_like(first) if g_last is None else rows.take_step(g_last).copy()
        g_x, totals = empty_array(data.shape, data.dtype), np.empty(pieces(data.shape[1], _BLOCK))
        p = constants_of(ctx.spec, data.dtype, w, learn=need_w)
        run(steps_backward, len(totals), data, first, g, g_v, g_x, totals, p, _BLOCK)
        return (
            rows.give(g_x).to(x.dtype) if need_x else None,
            rows.give_step(g_v).to(v0.dtype) if need_v else None,
            gradient_of_w(torch.from_numpy(totals).sum(), w, ctx.spec) if need_w else None,
            None,
            None,
        )


class _TimeRows:
    """A tensor ``[T, ...]`` as rows ``[T, M]`` in memory order, and back; copies only where a step is not dense."""

    def __init__(self, x: Tensor) -> None:
        self.dtype = torch.float32 if x.dtype in REDUCED else x.dtype
        self.order = [0] + [dim + 1 for dim in memory_order(x[0])]
        self.step_order = [dim - 1 for dim in self.order[1:]]
        self.shape = [x.shape[dim] for dim in self.order]

    def take(self, x: Tensor) -> np.ndarray:
        return x.detach().permute(self.order).to(self.dtype).contiguous().view(self.shape[0], -1).numpy()

    def take_step(self, v: Tensor) -> np.ndarray:
        return v.detach().permute(self.step_order).to(self.dtype).contiguous().view(1, -1).numpy()

    def first(self, v0: Tensor | None, spec: NeuronSpec) -> np.ndarray:
        if v0 is not None:
            return self.take_step(v0)
        return torch.full((1, math.prod(self.shape[1:])), spec.rest, dtype=self.dtype).numpy()

    def give(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows).view(self.shape).permute(_inverse(self.order))

    def give_step(self, row: np.ndarray) -> Tensor:
        return torch.from_numpy(row).view(self.shape[1:]).permute(_inverse(self.step_order))


def _inverse(order: list[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]
