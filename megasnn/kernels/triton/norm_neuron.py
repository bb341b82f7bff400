"""Norm, pooling and neurons, and neurons without a norm, by Triton kernels."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megasnn.kernels.compiled_neuron import CompiledKernels
from megasnn.kernels.neuron_spec import numbers
from megasnn.kernels.norm_neuron_kernels import (
    BackwardSums,
    NeuronInput,
    Norm,
    NormNeuron,
    NormNeuronInput,
    ParameterGradients,
)
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
_FOLDED_ROWS = 64  # of a tile of a kernel that folds partial sums
_FOLDED_COLUMNS = 16

Pooled = tuple[Tensor, Tensor] | None
"""With pooling, the gradients of the windows and the places in them that have won."""


class TritonKernels(CompiledKernels[Pooled]):
    def statistics(self, x: Tensor) -> Tensor:
        number = compute_type(x.dtype)
        channels = x.shape[2]
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

    def fire(self, inputs: NormNeuronInput, packed: bool = False) -> tuple[Tensor, Tensor | None]:
        x, norm, w, norm_neuron = inputs
        steps = norm_neuron.time_steps
        sizes = _sizes(x.shape, norm_neuron)
        number = compute_type(x.dtype)
        spikes = x.new_empty((steps, *sizes.step))
        bits = None
        if packed and sizes.size % 8 == 0:
            bits = x.new_empty((steps * sizes.size // 8,), dtype=torch.uint8)
        block = THREADS * lanes_of_type(x.dtype)
        repeated = len(x) < steps
        unrolled = 1 if norm_neuron.pool and not repeated else at_once(steps)
        launch(
            fire_kernel, -(-sizes.size // block),
            x, _coefficients(x, norm, norm_neuron.eps), None, factor(w, number), spikes, bits, None,
            sizes.size, sizes.in_size, sizes.channels, sizes.height, sizes.width, norm_neuron.above,
            T=steps, REPEATED=repeated, POOL=norm_neuron.pool,
            N=numbers(norm_neuron.spec), D=NUMBERS[number], AT_ONCE=unrolled, BLOCK=block,
        )  # fmt: skip
        spikes = spikes.movedim(-1, 2)
        if packed and bits is None:
            bits = pack_bits(spikes)
        return spikes, bits

    def backward_sums(self, inputs: NormNeuronInput, g_spikes: Tensor, learn: bool) -> BackwardSums[Pooled]:
        x, norm, w, norm_neuron = inputs
        steps = norm_neuron.time_steps
        sizes = _sizes(x.shape, norm_neuron)
        number = compute_type(x.dtype)
        coefficients = _coefficients(x, norm, norm_neuron.eps)
        g_pooled = None
        taps = None
        pooled = None
        if norm_neuron.pool:
            g_pooled = x.new_empty((len(x), sizes.size))
            taps = torch.empty_like(g_pooled, dtype=torch.uint8)
            pooled = (g_pooled, taps)
        cut = _cut(sizes.size, sizes.channels, lanes_of_backward(x.dtype, steps))
        kinds = 3 if learn else 2  # without a learned factor its sum is left out
        partial = x.new_empty((kinds, cut.programs, cut.row), dtype=number)
        launch(
            backward_sums_kernel, cut.programs * (cut.row // COLUMNS),
            x, g_spikes, coefficients, factor(w, number), g_pooled, taps, partial,
            chunk_memory(x, steps, sizes.size),
            sizes.size, sizes.in_size, sizes.channels, sizes.height, sizes.width, norm_neuron.above,
            cut.row, cut.programs, cut.tiles,
            T=steps, CHUNK=chunk(x.dtype, steps), REPEATED=len(x) < steps, POOL=norm_neuron.pool, LEARN=learn,
            N=numbers(norm_neuron.spec), D=NUMBERS[number], ROWS=cut.rows, COLUMNS=COLUMNS,
        )  # fmt: skip
        sums = x.new_empty((kinds, sizes.channels), dtype=torch.float64)
        g_weight = None if norm.weight is None else torch.empty_like(norm.weight)
        g_bias = None if norm.bias is None else torch.empty_like(norm.bias)
        launch(
            fold_sums_kernel, -(-sizes.channels // _FOLDED_COLUMNS),
            partial, norm.variance, sums, g_weight, g_bias, partial[0].numel() // sizes.channels, sizes.channels,
            SUMS=kinds, EPS=norm_neuron.eps, ROWS=_FOLDED_ROWS, COLUMNS=_FOLDED_COLUMNS,
        )  # fmt: skip
        return BackwardSums(sums, carried=pooled, of_norm=ParameterGradients(g_weight, g_bias))

    def input_gradient(
        self, inputs: NormNeuronInput, g_spikes: Tensor, sums: Tensor | None, count: int, carried: Pooled
    ) -> Tensor:
        x, norm, w, norm_neuron = inputs
        steps = norm_neuron.time_steps
        sizes = _sizes(x.shape, norm_neuron)
        number = compute_type(x.dtype)
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
        block = THREADS * lanes_of_backward(x.dtype, steps)
        launch(
            gradient_kernel, -(-sizes.size // block),
            x, g_spikes, g_x, coefficients, None, None, None, factor(w, number), None,
            chunk_memory(x, steps, sizes.size), sizes.size, sizes.channels,
            T=steps, CHUNK=chunk(x.dtype, steps), REPEATED=len(x) < steps, BATCH=sums is not None,
            N=numbers(norm_neuron.spec), D=NUMBERS[number], BLOCK=block,
        )  # fmt: skip
        return g_x

    def fire_alone(self, inputs: NeuronInput, packed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        x, v0, w, spec = inputs
        number = compute_type(x.dtype)
        block = THREADS * lanes_of_type(x.dtype)
        size = x[0].numel()
        spikes = torch.empty_like(x)
        last = torch.empty_like(x[0], dtype=number)
        bits = None
        if packed and size % 8 == 0:
            bits = x.new_empty(spikes.numel() // 8, dtype=torch.uint8)
        launch(
            fire_kernel, -(-size // block),
            x, None, v0, factor(w, number), spikes, bits, last, size, size, size, 0, 0, 0,
            T=len(x), REPEATED=False, POOL=False, N=numbers(spec), D=NUMBERS[number], AT_ONCE=at_once(len(x)),
            BLOCK=block,
        )  # fmt: skip
        return spikes, last, bits

    def backward_alone(
        self, inputs: NeuronInput, g_spikes: Tensor, g_last: Tensor | None, learn: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, v0, w, spec = inputs
        number = compute_type(x.dtype)
        block = THREADS * lanes_of_backward(x.dtype, len(x))
        size = x[0].numel()
        programs = -(-size // block)
        g_x = torch.empty_like(x)
        g_first = None if v0 is None else torch.empty_like(x[0], dtype=number)
        totals = x.new_empty(programs, dtype=torch.float64) if learn else None
        launch(
            gradient_kernel, programs,
            x, g_spikes, g_x, None, v0, g_last, g_first, factor(w, number), totals, chunk_memory(x, len(x), size),
            size, size,
            T=len(x), CHUNK=chunk(x.dtype, len(x)), REPEATED=False, BATCH=False, N=numbers(spec), D=NUMBERS[number],
            BLOCK=block,
        )  # fmt: skip
        return g_x, g_first, None if totals is None else totals.sum()


def factor(w: Tensor | None, number: torch.dtype) -> Tensor | None:
    """Learned factor of the charge, or None; it stays on the device."""
    return None if w is None else w.detach().to(number).sigmoid()


class _Sizes(NamedTuple):
    """Sizes of norm, pooling and neurons.

    Attributes:
        size, in_size: values of one time step of the neurons, and of the input.
        height, width: of the input; 0 without pooling.
        step: shape of one time step of spikes in memory.
    """

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
    """Cut of values for a kernel of sums: values of a row, rows of a tile, tiles of a program, programs."""

    row: int
    rows: int
    tiles: int
    programs: int


@lru_cache(maxsize=1024)
def _cut(values: int, channels: int, lanes: int) -> _Cut:
    row = math.lcm(channels, COLUMNS)
    rows = THREADS * lanes // COLUMNS
    tiles = -(-values // (row * rows))
    tiles_of_program = max(1, min(TILES, tiles * (row // COLUMNS) // _PROGRAMS))
    return _Cut(row, rows, tiles_of_program, -(-tiles // tiles_of_program))


def _coefficients(x: Tensor, norm: Norm, eps: float, sums: Tensor | None = None, count: int = 0) -> Tensor:
    """Rows of numbers for each channel; see `coefficients_kernel`."""
    channels = x.shape[2]
    rows = x.new_empty((3 if sums is None else 5, channels), dtype=compute_type(x.dtype))
    launch(
        coefficients_kernel, -(-channels // COLUMNS),
        norm.mean, norm.variance, norm.weight, norm.bias, sums, rows, count, channels, EPS=eps, COLUMNS=COLUMNS,
    )  # fmt: skip
    return rows
