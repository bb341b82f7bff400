"""The loops of norm and neuron: statistics, spikes, gradients.

A block is a whole number of pixels, so that coefficients of channels, repeated to its length, make the innermost loops
long whatever the number of channels is. Sums are added side by side in a row, pixels of which are added at the end of
a unit of work: their order does not depend on the number of threads.

Arguments: `x [X, M]` with X = T, or 1 for an input that is repeated; spikes and their gradients `[T, M]`; `first, last`
the range of units of work to do, so that threads can share a call.
"""

from __future__ import annotations

import numpy as np

from megasnn.kernels.fused.row import backward_through_time, charge_again, fire
from megasnn.kernels.jit import kernel, part


@part
def fold(wide, channels, out):
    """Sums the pixels of a row: `wide [k * C]` -> `out [C]` in double precision."""
    out[:] = 0.0
    for start in range(0, wide.size, channels):
        piece = wide[start : start + channels]
        for c in range(channels):
            out[c] += piece[c]


@part
def add_rows(x, wide):
    """Adds rows as long as `wide` one after the other, four at a time: each sum is read and written less often."""
    width = wide.size
    fours = x.size // (4 * width) * 4 * width
    for start in range(0, fours, 4 * width):
        a, b = x[start : start + width], x[start + width : start + 2 * width]
        c, d = x[start + 2 * width : start + 3 * width], x[start + 3 * width : start + 4 * width]
        for j in range(width):
            wide[j] = (((wide[j] + a[j]) + b[j]) + c[j]) + d[j]
    for start in range(fours, x.size, width):
        row = x[start : start + width]
        for j in range(row.size):
            wide[j] += row[j]


@part
def add_squares(x, centre, wide):
    """The same with squared deviations from `centre`."""
    width = wide.size
    fours = x.size // (4 * width) * 4 * width
    for start in range(0, fours, 4 * width):
        a, b = x[start : start + width], x[start + width : start + 2 * width]
        c, d = x[start + 2 * width : start + 3 * width], x[start + 3 * width : start + 4 * width]
        for j in range(width):
            m = centre[j]
            p, q, r, s = a[j] - m, b[j] - m, c[j] - m, d[j] - m
            wide[j] = (((wide[j] + p * p) + q * q) + r * r) + s * s
    for start in range(fours, x.size, width):
        row = x[start : start + width]
        for j in range(row.size):
            deviation = row[j] - centre[j]
            wide[j] += deviation * deviation


@kernel
def statistics(x, channels, width, rows, means, squares, first, last):
    """Mean and sum of squared deviations of each channel, for each unit of work: `rows` rows of the flat `x`.

    Two passes over a unit while it is in the cache; the caller merges `means, squares [units, C]` exactly.
    """
    wide, centre = np.empty(width, x.dtype), np.empty(width, x.dtype)
    for unit in range(first, last):
        values = x[unit * rows * width : min((unit + 1) * rows * width, x.size)]
        wide[:] = 0
        add_rows(values, wide)
        fold(wide, channels, means[unit])
        pixels = values.size // channels
        for c in range(channels):
            means[unit, c] /= pixels
        for start in range(0, width, channels):
            for c in range(channels):
                centre[start + c] = means[unit, c]
        wide[:] = 0
        add_squares(values, centre, wide)
        fold(wide, channels, squares[unit])


@kernel
def fire_block(x, scale, shift, spikes, p, first, last):
    """Spikes `[T, M]`; a unit of work is one block, as long as `scale` and `shift`."""
    width = scale.size
    v = np.empty(width, x.dtype)
    for block in range(first, last):
        low, high = block * width, min((block + 1) * width, x.shape[1])
        n = high - low
        v[:] = p.rest
        for t in range(spikes.shape[0]):
            step = x[min(t, x.shape[0] - 1), low:high]
            fire(step, (scale[:n], shift[:n]), v[:n], spikes[t, low:high], p)


@kernel
def block_backward(x, g_spikes, scale, shift, mean, g_y, sums, channels, blocks, p, first, last):
    """The gradient `g_y [X, M]` of the normalised input from `g_spikes [T, M]`.

    Each unit of `blocks` blocks fills one of `sums [units, 3, C]`: of g_y, of g_y (x - mean), and what `of_factor`
    gives. `scale`, `shift` and `mean` are as long as a block.
    """
    steps, inputs, length = g_spikes.shape[0], x.shape[0], scale.size
    h = np.empty((steps, length), x.dtype)
    v, row, g_v = np.empty(length, x.dtype), np.empty(length, x.dtype), np.empty(length, x.dtype)
    rest, wide = np.full(length, p.rest), np.empty((3, length), x.dtype)
    for unit in range(first, last):
        wide[:] = 0
        for low in range(unit * blocks * length, min((unit + 1) * blocks * length, x.shape[1]), length):
            high = min(low + length, x.shape[1])
            n = high - low
            v[:] = p.rest
            g_v[:] = p.zero
            for t in range(steps):
                step = x[min(t, inputs - 1), low:high]
                charge_again(step, (scale[:n], shift[:n]), v[:n], h[t, :n], p)
            norm = (x, mean, wide[0], wide[1])
            backward_through_time(h, rest[:n], g_spikes, low, g_v[:n], g_y, low, n, norm, row, v, wide[2, :n], p)
        for k in range(3):
            fold(wide[k], channels, sums[unit, k])


@kernel
def input_gradient(x, g, scale, mean, mean_g, mean_gx, first, last):
    """Batch norm's input gradient, in place of `g`; `x, g` flat, the rest as long as a block, which is a unit."""
    width = scale.size
    for block in range(first, last):
        low, high = block * width, min((block + 1) * width, x.size)
        row, target = x[low:high], g[low:high]
        for j in range(row.size):
            target[j] = scale[j] * (target[j] - mean_g[j] - (row[j] - mean[j]) * mean_gx[j])
