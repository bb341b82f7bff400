"""Kernels for norm and neurons without pooling; they must equal `torch_backend`.

`x [X, M]` with X = T, or 1 for a repeated input; spikes and their gradients `[T, M]`. `first, last` is a range of work
slices: threads share a call.
"""

from __future__ import annotations

import numpy as np

from megasnn.kernels.numba.coefficients import input_gradient_coefficients, repeated
from megasnn.kernels.numba.jit import kernel, part
from megasnn.kernels.numba.lanes import count_of, lane_of, lanes_of, load, store
from megasnn.kernels.numba.time_loop import LANES, back, fire_run

# A block is a whole number of pixels. The channels' coefficients are repeated to its length, which makes the innermost
# loops long for any number of channels. Sums are formed side by side in a row of pixels; the pixels of the row are
# added at the end of a slice of work. So the order of a sum does not depend on the number of threads.


@part
def fold(wide, channels, out):
    """Sums a row's pixels: `wide [k * C]` -> `out [C]` in double precision."""
    out[:] = 0.0
    for start in range(0, wide.size, channels):
        piece = wide[start : start + channels]
        for c in range(channels):
            out[c] += piece[c]


@part
def add_rows(x, wide):
    """Adds rows as long as `wide` to it."""
    width = wide.size
    # Four at a time: each sum is read and written less often.
    fours = x.size // (4 * width) * 4 * width
    for start in range(0, fours, 4 * width):
        a = x[start : start + width]
        b = x[start + width : start + 2 * width]
        c = x[start + 2 * width : start + 3 * width]
        d = x[start + 3 * width : start + 4 * width]
        for j in range(width):
            wide[j] = (((wide[j] + a[j]) + b[j]) + c[j]) + d[j]
    for start in range(fours, x.size, width):
        row = x[start : start + width]
        for j in range(row.size):
            wide[j] += row[j]


@part
def add_squares(x, centre, wide):
    """As `add_rows`, squared deviations from `centre`."""
    width = wide.size
    fours = x.size // (4 * width) * 4 * width
    for start in range(0, fours, 4 * width):
        a = x[start : start + width]
        b = x[start + width : start + 2 * width]
        c = x[start + 2 * width : start + 3 * width]
        d = x[start + 3 * width : start + 4 * width]
        for j in range(width):
            m = centre[j]
            p = a[j] - m
            q = b[j] - m
            r = c[j] - m
            s = d[j] - m
            wide[j] = (((wide[j] + p * p) + q * q) + r * r) + s * s
    for start in range(fours, x.size, width):
        row = x[start : start + width]
        for j in range(row.size):
            deviation = row[j] - centre[j]
            wide[j] += deviation * deviation


@kernel
def slice_statistics(x, channels, width, rows, means, squares, first, last):
    """Each channel's mean and sum of squared deviations, `means, squares [slices, C]`.

    A work slice is `rows` rows of the flat `x`.
    """
    # A slice is read twice while it is in the cache: first for the mean, then for exact deviations.
    wide = np.empty(width, x.dtype)
    centre = np.empty(width, x.dtype)
    for index in range(first, last):
        values = x[index * rows * width : min((index + 1) * rows * width, x.size)]
        wide[:] = 0
        add_rows(values, wide)
        fold(wide, channels, means[index])
        pixels = values.size // channels
        for c in range(channels):
            means[index, c] /= pixels
        for start in range(0, width, channels):
            for c in range(channels):
                centre[start + c] = means[index, c]
        wide[:] = 0
        add_squares(values, centre, wide)
        fold(wide, channels, squares[index])


@kernel
def merge(means, squares, length, pixels, merged, first, last):
    """Each channel's mean and variance, `merged [2, C]`; slices have `length` pixels, `pixels` in all."""
    slices, channels = means.shape
    mean = merged[0]
    variance = merged[1]
    merged[:] = 0.0
    for index in range(slices):
        count = min(length, pixels - index * length)
        for c in range(channels):
            mean[c] += count * means[index, c]
    for c in range(channels):
        mean[c] /= pixels
    for index in range(slices):
        count = min(length, pixels - index * length)
        for c in range(channels):
            deviation = means[index, c] - mean[c]
            variance[c] += squares[index, c] + count * (deviation * deviation)
    for c in range(channels):
        variance[c] /= pixels


@kernel
def fire_block(x, coefficients, v_first, v_last, spikes, bits, p, length, first, last):
    """Spikes `[T, M]` by `time_loop.fire_run`; a work slice is one block. `coefficients`: None without a norm."""
    norm = repeated(coefficients, 2, length, x)
    for block in range(first, last):
        low = block * length
        fire_run(x, low, norm, v_first, v_last, spikes, low, min(length, spikes.shape[1] - low), bits, p)


@kernel
def block_backward(x, coefficients, v_first, g_spikes, g_v, g_y, sums, channels, length, blocks, p, first, last):
    """Neurons' input gradient `g_y [X, M]`, and `sums [slices, 3, C]`; the rest as `time_loop.back`.

    A work slice is `blocks` blocks.
    """
    size = x.shape[1]
    norm = repeated(coefficients, 3, length, x)
    scratch = np.empty((2 * g_spikes.shape[0], LANES), x.dtype)
    wide = np.empty((3, length), x.dtype)
    for index in range(first, last):
        wide[:] = 0
        sums[index] = 0.0
        for low in range(index * blocks * length, min((index + 1) * blocks * length, size), length):
            back(x, low, norm, v_first, g_spikes, low, min(length, size - low), g_v, g_y, wide, p, scratch)
        if norm is not None:
            fold(wide[0], channels, sums[index, 0])
            fold(wide[1], channels, sums[index, 1])
        if p.learn:
            fold(wide[2], channels, sums[index, 2])


@kernel
def norm_input_gradient(x, g, coefficients, sums, count, period, width, first, last):
    """Batch norm's input gradient, written over `g [1, size]`; a work slice is `width` elements.

    `sums [3, C]` over `count` values; `period`: length of the repeated coefficients.
    """
    wide = repeated(input_gradient_coefficients(coefficients, sums, count), 4, period, x)
    many = lanes_of(x[0, 0])
    one = lane_of(x[0, 0])
    for index in range(first, last):
        for low in range(index * width, min((index + 1) * width, x.shape[1]), period):
            n = min(period, x.shape[1] - low)
            whole = n - n % count_of(many)
            normalise_back(many, 0, whole, x, g, low, wide)
            normalise_back(one, whole, n, x, g, low, wide)


@part
def normalise_back(like, first, last, x, g, low, wide):
    for j in range(first, last, count_of(like)):
        deviation = load(x, 0, low + j, like) - load(wide, 1, j, like)
        centred = load(g, 0, low + j, like) - load(wide, 2, j, like)
        centred = centred - deviation * load(wide, 3, j, like)
        store(g, 0, low + j, load(wide, 0, j, like) * centred)
