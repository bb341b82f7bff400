"""Launches for norm, pooling and neurons, worked out once per input shape and type."""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from megasnn.kernels.neuron_spec import NeuronSpec, numbers
from megasnn.kernels.norm_neuron_kernels import NormNeuron
from megasnn.kernels.triton.fire import fire_kernel, gradient_kernel
from megasnn.kernels.triton.launch import (
    COLUMNS,
    THREADS,
    TILES,
    TRITON_TYPES,
    Launch,
    at_once,
    bytes_of_bits,
    chunk,
    chunks_shape,
    compute_type,
    lanes_of_backward,
    lanes_of_type,
)
from megasnn.kernels.triton.pool import pooled_gradient_kernel
from megasnn.kernels.triton.sums import (
    backward_sums_kernel,
    coefficients_kernel,
    fold_statistics_kernel,
    fold_sums_kernel,
    mean_gradients_kernel,
    statistics_kernel,
)

PROGRAMS = 1024  # enough for a large GPU: where there is less to sum, a program sums fewer tiles
_FOLDED_ROWS = 64  # of a tile of a kernel that folds partial sums
_FOLDED_COLUMNS = 16


class SumTiling(NamedTuple):
    """How a kernel divides its sums: values in a row, rows in a tile, tiles in a program, programs."""

    row: int
    rows: int
    tiles: int
    programs: int

    @classmethod
    def of(cls, values: int, channels: int, lanes: int) -> SumTiling:
        # Whole pixels and whole tiles: a column of the partial sums belongs to one channel.
        row = math.lcm(channels, COLUMNS)
        rows = THREADS * lanes // COLUMNS
        tiles = -(-values // (row * rows))
        tiles_of_program = max(1, min(TILES, tiles * (row // COLUMNS) // PROGRAMS))
        return cls(row, rows, tiles_of_program, -(-tiles // tiles_of_program))


class StatisticsLaunches:
    def __init__(self, shape: torch.Size, dtype: torch.dtype, eps: float) -> None:
        channels = shape[2]
        values = shape.numel()
        tiling = SumTiling.of(values, channels, lanes_of_type(dtype))
        self.compute_dtype = compute_type(dtype)
        self.partial_shape = (3, tiling.programs, tiling.row)
        self.sums = Launch(
            statistics_kernel, tiling.programs * (tiling.row // COLUMNS),
            values, tiling.row, tiling.programs, tiling.tiles,
            D=TRITON_TYPES[self.compute_dtype], ROWS=tiling.rows, COLUMNS=COLUMNS,
        )  # fmt: skip
        self.fold = Launch(
            fold_statistics_kernel, -(-channels // _FOLDED_COLUMNS),
            tiling.programs * tiling.row // channels, channels, values // channels,
            EPS=eps, ROWS=_FOLDED_ROWS, COLUMNS=_FOLDED_COLUMNS,
        )  # fmt: skip


@lru_cache(maxsize=1024)
def coefficients_launch(channels: int, eps: float) -> Launch:
    return Launch(coefficients_kernel, -(-channels // COLUMNS), channels, EPS=eps, COLUMNS=COLUMNS)


@lru_cache(maxsize=1024)
def mean_gradients_launch(channels: int, eps: float, count: int) -> Launch:
    return Launch(mean_gradients_kernel, -(-channels // COLUMNS), count, channels, EPS=eps, COLUMNS=COLUMNS)


class NormNeuronLaunches:
    """Launches for one input shape and type.

    Attributes:
        size: values in one time step's spikes.
        partial_shape: one kind of partial sums.
        sums, fold: by whether the learned factor's gradient is wanted.
        bytes_of_bits, chunks_shape: see launch.py.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, norm_neuron: NormNeuron) -> None:
        samples, channels, *space = shape[1:]
        steps = norm_neuron.time_steps
        step = (samples, *norm_neuron.space_of_spikes(space), channels)
        self.compute_dtype = compute_type(dtype)
        self.channels = channels
        self.size = math.prod(step)
        self.spikes_shape = (steps, *step)
        self.bytes_of_bits = bytes_of_bits(steps, self.size)
        self.chunks_shape = chunks_shape(dtype, steps, self.size)
        self._dtype = dtype
        self._norm_neuron = norm_neuron
        self._input_steps = shape[0]
        self._in_size = math.prod(shape[1:])
        self._sides = tuple(space) if norm_neuron.pool else (0, 0)
        self._tiling = SumTiling.of(self.size, channels, lanes_of_backward(dtype, steps))
        self.partial_shape = (self._tiling.programs, self._tiling.row)
        # Constants of the compilation: Triton compiles a kernel for each set of them.
        self._common = {
            "T": steps,
            "REPEATED": shape[0] < steps,
            "N": numbers(norm_neuron.spec),
            "D": TRITON_TYPES[self.compute_dtype],
        }
        self.sums = {learn: self._sums(learn) for learn in (False, True)}
        self.fold = {learn: self._fold(learn) for learn in (False, True)}

    @cached_property
    def fire(self) -> Launch:
        norm_neuron = self._norm_neuron
        block = THREADS * lanes_of_type(self._dtype)
        pools_each_step = norm_neuron.pool and not self._common["REPEATED"]
        steps_at_once = 1 if pools_each_step else at_once(norm_neuron.time_steps)
        return Launch(
            fire_kernel, -(-self.size // block),
            self.size, self._in_size, self.channels, *self._sides, norm_neuron.above,
            POOL=norm_neuron.pool, AT_ONCE=steps_at_once, BLOCK=block,
            **self._common,
        )  # fmt: skip

    def _sums(self, learn: bool) -> Launch:
        norm_neuron = self._norm_neuron
        tiling = self._tiling
        return Launch(
            backward_sums_kernel, tiling.programs * (tiling.row // COLUMNS),
            self.size, self._in_size, self.channels, *self._sides, norm_neuron.above,
            tiling.row, tiling.programs, tiling.tiles,
            CHUNK=chunk(self._dtype, norm_neuron.time_steps), POOL=norm_neuron.pool, LEARN=learn,
            ROWS=tiling.rows, COLUMNS=COLUMNS, **self._common,
        )  # fmt: skip

    def _fold(self, learn: bool) -> Launch:
        values = self._input_steps * self._in_size // self.channels
        return Launch(
            fold_sums_kernel, -(-self.channels // _FOLDED_COLUMNS),
            self._tiling.programs * self._tiling.row // self.channels, self.channels, values,
            LEARN=learn, EPS=self._norm_neuron.eps, ROWS=_FOLDED_ROWS, COLUMNS=_FOLDED_COLUMNS,
        )  # fmt: skip

    @cached_property
    def pooled_gradient(self) -> Launch:
        block = THREADS * lanes_of_type(self._dtype)
        blocks = -(-self._in_size // block)
        return Launch(
            pooled_gradient_kernel, self._input_steps * blocks,
            self.size, self._in_size, blocks, self.channels, *self._sides, self._norm_neuron.above,
            D=TRITON_TYPES[self.compute_dtype], BLOCK=block,
        )  # fmt: skip

    @cached_property
    def gradient(self) -> Launch:
        steps = self._norm_neuron.time_steps
        block = THREADS * lanes_of_backward(self._dtype, steps)
        return Launch(
            gradient_kernel, -(-self.size // block), self.size, self.channels,
            CHUNK=chunk(self._dtype, steps), BLOCK=block, **self._common,
        )  # fmt: skip


class NeuronLaunches:
    """Launches for neurons without a norm, for one input shape and type.

    Attributes:
        bytes_of_bits, chunks_shape: see launch.py.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, spec: NeuronSpec) -> None:
        steps = shape[0]
        size = math.prod(shape[1:])
        block = THREADS * lanes_of_type(dtype)
        backward_block = THREADS * lanes_of_backward(dtype, steps)
        self.compute_dtype = compute_type(dtype)
        self.bytes_of_bits = bytes_of_bits(steps, size)
        self.chunks_shape = chunks_shape(dtype, steps, size)
        self.programs = -(-size // backward_block)
        common = {"T": steps, "REPEATED": False, "N": numbers(spec), "D": TRITON_TYPES[self.compute_dtype]}
        self.fire = Launch(
            fire_kernel, -(-size // block), size, size, size, 0, 0, 0,
            POOL=False, AT_ONCE=at_once(steps), BLOCK=block, **common,
        )  # fmt: skip
        self.gradient = Launch(
            gradient_kernel, self.programs, size, size, CHUNK=chunk(dtype, steps), BLOCK=backward_block, **common
        )
