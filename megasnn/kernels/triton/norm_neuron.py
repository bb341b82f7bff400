"""Norm, pooling and neuron by Triton kernels: see `megasnn.kernels.norm_neuron`; and neurons without a norm."""

from __future__ import annotations

import math
import sys
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from megasnn.kernels.neuron import neuron_by
from megasnn.kernels.neuron_spec import NeuronSpec, numbers
from megasnn.kernels.norm_neuron import Norm, NormNeuron, ParameterGradients
from megasnn.kernels.spike_codec import pack_bits
from megasnn.kernels.triton.fire import fire_kernel, gradient_kernel
from megasnn.kernels.triton.launch import (
    COLUMNS,
    NUMBERS,
    THREADS,
    TILES,
    at_once,
    chunk,
    chunk_memory,
    compute_type,
    lanes_of_backward,
    lanes_of_type,
    launch,
)
from megasnn.kernels.triton.pool import pooled_gradient_kernel
from megasnn.kernels.triton.sums import (
    backward_sums_kernel,
    coefficients_kernel,
    fold_statistics_kernel,
    fold_sums_kernel,
    statistics_kernel,
)

_PROGRAMS = 1024  # enough for a large GPU: where there is less to sum, a program sums fewer tiles
_FOLDED_ROWS, _FOLDED_COLUMNS = 64, 16
neuron_multi_step = partial(neuron_by, sys.modules[__name__])


def statistics(x: Tensor) -> Tensor:
    number, channels = compute_type(x.dtype), x.shape[2]
    cut = _cut(x.numel(), channels, lanes_of_type(x.dtype))
    partial = x.new_empty((3, cut.programs, cut.row), dtype=number)
    launch(
        statistics_kernel, cut.programs * (cut.row // COLUMNS),
        x, partial, x.numel(), cut.row, cut.programs, cut.tiles,
        D=NUMBERS[number], ROWS=cut.rows, COLUMNS=COLUMNS,
    )  # fmt: skip
    found = x.new_empty((2, channels), dtype=torch.float64)
    launch(
        fold_statistics_kernel, -(-channels // _FOLDED_COLUMNS),
        partial, found, partial[0].numel() // channels, channels, x.numel() // channels,
        ROWS=_FOLDED_ROWS, COLUMNS=_FOLDED_COLUMNS,
    )  # fmt: skip
    return found


def fire(
    x: Tensor, norm: Norm, w: Tensor | None, norm_neuron: NormNeuron, packed: bool = False
) -> tuple[Tensor, Tensor | None]:
    sizes, number = _sizes(x.shape, norm_neuron), compute_type(x.dtype)
    spikes = x.new_empty((norm_neuron.time_steps, *sizes.step))
    whole_bytes = packed and sizes.size % 8 == 0
    bits = x.new_empty((norm_neuron.time_steps * sizes.size // 8,), dtype=torch.uint8) if whole_bytes else None
    block, repeated = THREADS * lanes_of_type(x.dtype), len(x) < norm_neuron.time_steps
    launch(
        fire_kernel, -(-sizes.size // block),
        x, _coefficients(x, norm, norm_neuron.eps), None, factor(w, number), spikes, bits, None,
        sizes.size, sizes.in_size, sizes.channels, sizes.height, sizes.width, norm_neuron.above,
        T=norm_neuron.time_steps, REPEATED=repeated, POOL=norm_neuron.pool,
        N=numbers(norm_neuron.spec), D=NUMBERS[number],
        AT_ONCE=1 if norm_neuron.pool and not repeated else at_once(norm_neuron.time_steps), BLOCK=block,
    )  # fmt: skip
    spikes = spikes.movedim(-1, 2)
    return spikes, pack_bits(spikes) if packed and bits is None else bits


def backward_sums(
    x: Tensor, g_spikes: Tensor, norm: Norm, w: Tensor | None, norm_neuron: NormNeuron, learn: bool
) -> tuple[Tensor, tuple[Tensor, Tensor] | None, ParameterGradients]:
    sizes, number = _sizes(x.shape, norm_neuron), compute_type(x.dtype)
    coefficients = _coefficients(x, norm, norm_neuron.eps)
    g_pooled = x.new_empty((len(x), sizes.size)) if norm_neuron.pool else None
    taps = None if g_pooled is None else torch.empty_like(g_pooled, dtype=torch.uint8)
    cut = _cut(sizes.size, sizes.channels, lanes_of_backward(x.dtype, norm_neuron.time_steps))
    partial = x.new_empty((3 if learn else 2, cut.programs, cut.row), dtype=number)
    launch(
        backward_sums_kernel, cut.programs * (cut.row // COLUMNS),
        x, g_spikes, coefficients, factor(w, number), g_pooled, taps, partial,
        chunk_memory(x, norm_neuron.time_steps, sizes.size),
        sizes.size, sizes.in_size, sizes.channels, sizes.height, sizes.width, norm_neuron.above,
        cut.row, cut.programs, cut.tiles,
        T=norm_neuron.time_steps, CHUNK=chunk(x.dtype, norm_neuron.time_steps),
        REPEATED=len(x) < norm_neuron.time_steps, POOL=norm_neuron.pool, LEARN=learn,
        N=numbers(norm_neuron.spec), D=NUMBERS[number], ROWS=cut.rows, COLUMNS=COLUMNS,
    )  # fmt: skip
    sums = x.new_empty((len(partial), sizes.channels), dtype=torch.float64)
    of_norm = ParameterGradients(*(None if each is None else torch.empty_like(each) for each in norm[2:]))
    launch(
        fold_sums_kernel, -(-sizes.channels // _FOLDED_COLUMNS),
        partial, norm.variance, sums, *of_norm, partial[0].numel() // sizes.channels, sizes.channels,
        SUMS=len(partial), EPS=norm_neuron.eps, ROWS=_FOLDED_ROWS, COLUMNS=_FOLDED_COLUMNS,
    )  # fmt: skip
    return sums, None if g_pooled is None or taps is None else (g_pooled, taps), of_norm


def input_gradient(
    x: Tensor,
    g_spikes: Tensor,
    norm: Norm,
    w: Tensor | None,
    norm_neuron: NormNeuron,
    sums: Tensor | None,
    count: int,
    carried: tuple[Tensor, Tensor] | None,
) -> Tensor:
    sizes, number = _sizes(x.shape, norm_neuron), compute_type(x.dtype)
    coefficients = _coefficients(x, norm, norm_neuron.eps, sums, count)
    g_x = torch.empty_like(x)  # as dense as x, and in its order
    if carried is not None:
        block = THREADS * lanes_of_type(x.dtype)
        blocks = -(-sizes.in_size // block)
        launch(
            pooled_gradient_kernel, len(x) * blocks,
            x, *carried, g_x, coefficients,
            sizes.size, sizes.in_size, blocks, sizes.channels, sizes.height, sizes.width, norm_neuron.above,
            BATCH=sums is not None, D=NUMBERS[number], BLOCK=block,
        )  # fmt: skip
        return g_x
    block = THREADS * lanes_of_backward(x.dtype, norm_neuron.time_steps)
    launch(
        gradient_kernel, -(-sizes.size // block),
        x, g_spikes, g_x, coefficients, None, None, None, factor(w, number), None,
        chunk_memory(x, norm_neuron.time_steps, sizes.size), sizes.size, sizes.channels,
        T=norm_neuron.time_steps, CHUNK=chunk(x.dtype, norm_neuron.time_steps),
        REPEATED=len(x) < norm_neuron.time_steps, BATCH=sums is not None,
        N=numbers(norm_neuron.spec), D=NUMBERS[number], BLOCK=block,
    )  # fmt: skip
    return g_x


def factor(w: Tensor | None, number: torch.dtype) -> Tensor | None:
    """Factor of the charge where it is learned; it stays on the device."""
    return None if w is None else w.detach().to(number).sigmoid()


class _Sizes(NamedTuple):
    """Values of a time step of the neurons and of the input, the input's channels and sides, a step's shape of spikes
    in memory."""

    size: int
    in_size: int
    channels: int
    height: int
    width: int
    step: tuple[int, ...]


@lru_cache(maxsize=1024)
def _sizes(shape: torch.Size, norm_neuron: NormNeuron) -> _Sizes:
    samples, channels, *space = shape[1:]
    height, width = space if norm_neuron.pool else (0, 0)
    step = (samples, *norm_neuron.space_of_spikes(space), channels)
    return _Sizes(math.prod(step), math.prod(shape[1:]), channels, height, width, step)


class _Cut(NamedTuple):
    """Cut of values for a kernel that sums: the length of a row, rows of a tile, tiles of a program, programs."""

    row: int
    rows: int
    tiles: int
    programs: int


@lru_cache(maxsize=1024)
def _cut(values: int, channels: int, lanes: int) -> _Cut:
    row, rows = math.lcm(channels, COLUMNS), THREADS * lanes // COLUMNS
    tiles = -(-values // (row * rows))
    together = max(1, min(TILES, tiles * (row // COLUMNS) // _PROGRAMS))
    return _Cut(row, rows, together, -(-tiles // together))


def _coefficients(x: Tensor, norm: Norm, eps: float, sums: Tensor | None = None, count: int = 0) -> Tensor:
    channels = x.shape[2]
    rows = x.new_empty((3 if sums is None else 5, channels), dtype=compute_type(x.dtype))
    launch(
        coefficients_kernel, -(-channels // COLUMNS),
        norm.mean, norm.variance, norm.weight, norm.bias, sums, rows, count, channels, EPS=eps, COLUMNS=COLUMNS,
    )  # fmt: skip
    return rows


def fire_alone(
    x: Tensor, v0: Tensor | None, w: Tensor | None, spec: NeuronSpec, packed: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `megasnn.kernels.neuron.neuron_by`."""
    number, block, size = compute_type(x.dtype), THREADS * lanes_of_type(x.dtype), x[0].numel()
    spikes, last = torch.empty_like(x), torch.empty_like(x[0], dtype=number)
    bits = x.new_empty(spikes.numel() // 8, dtype=torch.uint8) if packed and size % 8 == 0 else None
    launch(
        fire_kernel, -(-size // block),
        x, None, v0, factor(w, number), spikes, bits, last, size, size, size, 0, 0, 0,
        T=len(x), REPEATED=False, POOL=False, N=numbers(spec), D=NUMBERS[number], AT_ONCE=at_once(len(x)), BLOCK=block,
    )  # fmt: skip
    return spikes, last, bits


def backward_alone(
    x: Tensor,
    v0: Tensor | None,
    g_spikes: Tensor,
    g_last: Tensor | None,
    w: Tensor | None,
    spec: NeuronSpec,
    learn: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    number, block, size = compute_type(x.dtype), THREADS * lanes_of_backward(x.dtype, len(x)), x[0].numel()
    programs = -(-size // block)
    g_x, g_first = torch.empty_like(x), torch.empty_like(x[0], dtype=number) if v0 is not None else None
    totals = x.new_empty(programs, dtype=torch.float64) if learn else None
    launch(
        gradient_kernel, programs,
        x, g_spikes, g_x, None, v0, g_last, g_first, factor(w, number), totals, chunk_memory(x, len(x), size),
        size, size,
        T=len(x), CHUNK=chunk(x.dtype, len(x)), REPEATED=False, BATCH=False, N=numbers(spec), D=NUMBERS[number],
        BLOCK=block,
    )  # fmt: skip
    return g_x, g_first, None if totals is None else totals.sum()
