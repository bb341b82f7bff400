"""The fused backend: one pass over memory forward and two backward for norm, pool and neuron together.

For backward only the input of the unit and two numbers per channel are kept. Normalised values, potentials, spikes and
the pool's winners are computed again from them, in the same order and therefore with the same result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megasnn.kernels import compiled
from megasnn.kernels.fused_constants import numbers
from megasnn.kernels.layout import empty_array, memory_order
from megasnn.kernels.runtime import run
from megasnn.kernels.spec import NeuronSpec

_TORCH_TYPES = {"float32": torch.float32, "float64": torch.float64}
REDUCED = (torch.bfloat16, torch.float16)

_BLOCK = 1024  # elements of a neuron's block: with potentials of 4 to 10 steps it stays in the L1 cache
_NORM_BLOCK = 512  # the same for the norm, rounded up to whole pixels
_BLOCKS = 32  # blocks of a unit that sums: short enough for float32, long enough that folding costs nothing


def neuron_multi_step(x: Tensor, spec: NeuronSpec, v0: Tensor | None, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """See :func:`megasnn.kernels.unit.neuron_multi_step`."""
    return _Neuron.apply(x, v0, w, spec)


def norm_pool_neuron(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    eps: float,
    spec: NeuronSpec,
    w: Tensor | None,
    pool: bool,
    time_steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`megasnn.kernels.unit.norm_pool_neuron`.

    ``running``: mean and variance to normalise with, if not the batch's.
    """
    x = x.movedim(2, -1).contiguous().movedim(-1, 2)
    return _NormPoolNeuron.apply(x, weight, bias, w, running, _Unit(spec, eps, pool, time_steps))


def refuses(x: Tensor) -> str | None:
    """Why the kernels cannot take this input, or None where they can."""
    if x.device.type != "cpu":
        return f"they run on CPU tensors, not on {x.device}"
    if x.dtype not in (torch.float32, torch.float64, *REDUCED):
        return f"they take float32, float64, bfloat16 or float16, not {x.dtype}"
    if x.numel() == 0:
        return f"the input {tuple(x.shape)} is empty"
    return None


def constants(spec: NeuronSpec, dtype: np.dtype, w: Tensor | None, learn: bool) -> compiled.Constants:
    """A neuron as the numbers that the kernels take."""
    if w is None:
        return _fixed_constants(spec, dtype, learn)
    return _constants(spec, dtype, float(torch.sigmoid(w.detach().to(_TORCH_TYPES[dtype.name]))), learn)


@cache
def _fixed_constants(spec: NeuronSpec, dtype: np.dtype, learn: bool) -> compiled.Constants:
    return _constants(spec, dtype, 0.0, learn)


def _constants(spec: NeuronSpec, dtype: np.dtype, learned_leak: float, learn: bool) -> compiled.Constants:
    number, n = dtype.type, numbers(spec, learned_leak)
    return compiled.Constants(
        charge=getattr(compiled, n.charge),
        surrogate=getattr(compiled, n.surrogate),
        hard=n.hard,
        learn=learn,
        rest=number(n.rest),
        threshold=number(n.threshold),
        factor=number(n.factor),
        kept=number(n.kept),
        jump=number(n.jump),
        slide=number(n.slide),
        into=number(n.into),
        through=number(n.through),
        slope=number(n.slope),
        amplitude=number(n.amplitude),
        zero=number(0),
        one=number(1),
    )


def factor_gradient(total: float, spec: NeuronSpec, p: compiled.Constants, w: Tensor) -> Tensor:
    """The gradient of ``w``, with q = sigmoid(w), from what the kernels summed: see ``factor_backward`` there."""
    q = float(p.factor)
    value = total * (1.0 - q) / q if spec.decay_input else total * q * (1.0 - q)
    return torch.full_like(w, value)


class _Neuron(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, v0: Tensor | None, w: Tensor | None, spec: NeuronSpec) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        ctx.save_for_backward(x, v0, w)
        rows = _TimeRows(x)
        data = rows.take(x)
        first = rows.first(v0, spec)
        spikes, last = empty_array(data.shape, data.dtype), np.empty_like(first)
        p = constants(spec, data.dtype, w, learn=False)
        run(compiled.neuron_forward, _ceil(data.shape[1], _BLOCK), data, first, spikes, last, p, _BLOCK)
        return rows.give(spikes).to(x.dtype), rows.give_step(last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_spikes: Tensor | None, g_last: Tensor | None) -> tuple[Tensor | None, ...]:
        x, v0, w = ctx.saved_tensors
        rows = _TimeRows(x)
        data = rows.take(x)
        first = rows.first(v0, ctx.spec)
        g = np.zeros_like(data) if g_spikes is None else rows.take(g_spikes)
        g_v = np.zeros_like(first) if g_last is None else rows.take_step(g_last).copy()
        g_x, totals = empty_array(data.shape, data.dtype), np.empty(_ceil(data.shape[1], _BLOCK))
        p = constants(ctx.spec, data.dtype, w, learn=ctx.needs_input_grad[2])
        run(compiled.neuron_backward, len(totals), data, first, g, g_v, g_x, totals, p, _BLOCK)
        need_x, need_v, need_w, _ = ctx.needs_input_grad
        return (
            rows.give(g_x).to(x.dtype) if need_x else None,
            rows.give_step(g_v).to(v0.dtype) if need_v else None,
            factor_gradient(float(totals.sum()), ctx.spec, p, w) if need_w else None,
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
        return v.detach().permute(self.step_order).to(self.dtype).contiguous().view(-1).numpy()

    def first(self, v0: Tensor | None, spec: NeuronSpec) -> np.ndarray:
        if v0 is not None:
            return self.take_step(v0)
        return torch.full((math.prod(self.shape[1:]),), spec.rest, dtype=self.dtype).numpy()

    def give(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows).view(self.shape).permute(_inverse(self.order))

    def give_step(self, row: np.ndarray) -> Tensor:
        return torch.from_numpy(row).view(self.shape[1:]).permute(_inverse(self.step_order))


@dataclass(frozen=True)
class _Unit:
    spec: NeuronSpec
    eps: float
    pool: bool
    time_steps: int


class _NormPoolNeuron(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        w: Tensor | None,
        running: tuple[Tensor, Tensor] | None,
        unit: _Unit,
    ) -> tuple[Tensor, Tensor, Tensor]:
        data = _pixels(x)
        if running is None:
            mean, var = _statistics(data)
        else:
            mean, var = _double(running[0]), _double(running[1])
        norm = _Norm(mean, 1.0 / np.sqrt(var + unit.eps), weight, bias)
        p = constants(unit.spec, data.dtype, w, learn=False)
        spikes = _forward(data, norm, p, unit)
        ctx.set_materialize_grads(False)
        ctx.unit, ctx.mean, ctx.inverse, ctx.batch = unit, norm.mean, norm.inverse, running is None
        ctx.save_for_backward(x, weight, bias, w)
        means = torch.from_numpy(mean.astype(data.dtype)), torch.from_numpy(var.astype(data.dtype))
        ctx.mark_non_differentiable(*means)
        return torch.from_numpy(spikes).movedim(-1, 2).to(x.dtype), *means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_spikes: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        x, weight, bias, w = ctx.saved_tensors
        data = _pixels(x)
        norm = _Norm(ctx.mean, ctx.inverse, weight, bias)
        p = constants(ctx.unit.spec, data.dtype, w, learn=ctx.needs_input_grad[3])
        g, (sum_g, sum_gx, total) = _backward(data, _pixels(g_spikes), norm, p, ctx.unit)
        need_x, need_weight, need_bias, need_w = ctx.needs_input_grad[:4]
        if need_x:
            _norm_backward(data, g, norm, sum_g, sum_gx, ctx.batch)
        return (
            torch.from_numpy(g).movedim(-1, 2).to(x.dtype) if need_x else None,
            torch.from_numpy(sum_gx * norm.inverse).to(weight.dtype) if need_weight else None,
            torch.from_numpy(sum_g).to(bias.dtype) if need_bias else None,
            factor_gradient(float(total.sum()), ctx.unit.spec, p, w) if need_w else None,
            None,
            None,
        )


class _Norm:
    """y = scale x + shift per channel, in double precision until :meth:`tiled` repeats it for a row of pixels."""

    def __init__(self, mean: np.ndarray, inverse: np.ndarray, weight: Tensor | None, bias: Tensor | None) -> None:
        self.mean, self.inverse = mean, inverse
        self.scale = inverse if weight is None else inverse * _double(weight)
        self.shift = -mean * self.scale if bias is None else _double(bias) - mean * self.scale

    def tiled(self, pixels: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return _tile(self.scale, pixels, dtype), _tile(self.shift, pixels, dtype), _tile(self.mean, pixels, dtype)


def _statistics(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and biased variance per channel of ``[..., C]``, merged in double precision from short runs of pixels."""
    channels = data.shape[-1]
    width = _width(channels)
    pixels = data.size // channels
    run_length = _BLOCKS * width // channels
    units = _ceil(pixels, run_length)
    means, squares = np.empty((units, channels)), np.empty((units, channels))
    run(compiled.norm_statistics, units, data.reshape(-1), channels, width, _BLOCKS, means, squares)
    counts = np.full((units, 1), run_length, np.float64)
    counts[-1] = pixels - run_length * (units - 1)
    mean = (counts * means).sum(axis=0) / pixels
    var = (squares + counts * (means - mean) ** 2).sum(axis=0) / pixels
    return mean, var


def _forward(data: np.ndarray, norm: _Norm, p: compiled.Constants, unit: _Unit) -> np.ndarray:
    inputs, samples, *space, channels = data.shape
    if unit.pool:
        space = [(size + 1) // 2 for size in space]
    spikes = empty_array((unit.time_steps, samples, *space, channels), data.dtype)
    flat = spikes.reshape(unit.time_steps, -1)
    if unit.pool:
        scale, shift, _ = norm.tiled(space[1], data.dtype)
        run(compiled.pool_neuron_forward, samples * space[0], data, scale, shift, flat, p)
    else:
        width = _width(channels)
        scale, shift, _ = norm.tiled(width // channels, data.dtype)
        units = _ceil(flat.shape[1], width)
        run(compiled.norm_neuron_forward, units, data.reshape(inputs, -1), scale, shift, flat, p, width)
    return spikes


def _backward(
    data: np.ndarray, g_spikes: np.ndarray, norm: _Norm, p: compiled.Constants, unit: _Unit
) -> tuple[np.ndarray, np.ndarray]:
    """Gradient of the normalised input, and the three sums per channel ``[3, C]``."""
    inputs, channels = data.shape[0], data.shape[-1]
    flat = g_spikes.reshape(unit.time_steps, -1)
    g = empty_array(data.shape, data.dtype)
    if unit.pool:
        tiles = norm.tiled(g_spikes.shape[3], data.dtype)
        sums = np.empty((data.shape[1], 3, channels))
        run(compiled.pool_neuron_backward, len(sums), data, flat, *tiles, g, sums, p)
    else:
        width = _width(channels)
        tiles = norm.tiled(width // channels, data.dtype)
        sums = np.empty((_ceil(flat.shape[1], width * _BLOCKS), 3, channels))
        rows = data.reshape(inputs, -1), flat, *tiles, g.reshape(inputs, -1)
        run(compiled.norm_neuron_backward, len(sums), *rows, sums, channels, p, width, _BLOCKS)
    return g, sums.sum(axis=0)


def _norm_backward(
    data: np.ndarray, g: np.ndarray, norm: _Norm, sum_g: np.ndarray, sum_gx: np.ndarray, batch: bool
) -> None:
    """From the gradient of the norm's output to that of its input, in place."""
    channels = data.shape[-1]
    width = _width(channels)
    pixels = data.size // channels if batch else math.inf  # running statistics do not depend on the input
    scale, _, mean = norm.tiled(width // channels, data.dtype)
    mean_g = _tile(sum_g / pixels, width // channels, data.dtype)
    mean_gx = _tile(sum_gx * norm.inverse**2 / pixels, width // channels, data.dtype)
    flat = data.reshape(-1)
    run(compiled.norm_backward, _ceil(flat.size, width), flat, g.reshape(-1), scale, mean, mean_g, mean_gx, width)


def _pixels(x: Tensor) -> np.ndarray:
    """``[T, N, C, ...]`` as a contiguous array ``[T, N, ..., C]``, without a copy where the memory is channels-last."""
    x = x.detach().movedim(2, -1)
    return (x.float() if x.dtype in REDUCED else x).contiguous().numpy()


def _tile(values: np.ndarray, times: int, dtype: np.dtype) -> np.ndarray:
    """``values [C]`` so many times in a row, as ``np.tile`` gives it, which takes several times longer for so few."""
    tiled = np.empty((times, len(values)), dtype)
    tiled[:] = values
    return tiled.reshape(-1)


def _double(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def _width(channels: int) -> int:
    return channels * _ceil(_NORM_BLOCK, channels)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _inverse(order: list[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]
