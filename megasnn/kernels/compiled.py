"""The loops behind the fused backend, compiled by numba (LLVM) at first use and cached on disk.

Everything works on rows of contiguous elements, one row per time step, in pieces ("blocks") small enough for the L1
and L2 caches: a block walks through all time steps before the next one starts, so membrane potentials never reach
memory. A block of the norm is a whole number of pixels, ``width = k * C`` elements, and per-channel coefficients are
tiled to that width, so that the innermost loops are long whatever C is.

What is particular here:
 - no fast-math anywhere: the operations and their order are those of ``reference.py``, and no spike may flip;
 - loops are split so that each writes one or two arrays, because LLVM gives up vectorising where it would need more
   than eight run-time checks for overlapping arrays;
 - all of it stays in this one file, because numba notices a change in a file only for the functions defined in it.

Function arguments: ``x [X, M]`` with X = T, or 1 for an input that is repeated; spikes and their gradients ``[T, M]``;
``first, last`` the range of work units to do, so that threads can share a call.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from megasnn.kernels.jit import kernel, part

CHARGE_ADD, CHARGE_DIVIDE, CHARGE_SCALE, LEAK_DIVIDE, LEAK_SCALE = range(5)
SIGMOID, ATAN = range(2)


class Constants(NamedTuple):
    """A neuron in numbers, all floats in the dtype of the data (numba specialises on it)."""

    charge: int  # one of CHARGE_* and LEAK_*
    surrogate: int  # SIGMOID or ATAN
    hard: bool  # hard reset
    learn: bool  # the gradient of the charging factor is wanted
    rest: Any
    threshold: Any
    factor: Any  # what the charge divides or multiplies by
    kept: Any  # d(v after reset) / d(h) where a spike fired, without the path through the spike
    jump: Any  # d(v after reset) / d(spike) = jump - slide * h
    slide: Any
    into: Any  # d(h) / d(x)
    through: Any  # d(h) / d(v)
    slope: Any  # the surrogate gradient is amplitude * shape(slope * (h - threshold))
    amplitude: Any
    zero: Any
    one: Any


# ---------------------------------------------------------------------------------------------------- exponential


@intrinsic
def power_of_two(context, t):
    """2^k from ``t = k + 1.5 * 2^mantissa_bits``: the low bits of such a number hold k, which becomes the exponent."""
    width, exponent_bias, mantissa_bits = (32, 127, 23) if t == types.float32 else (64, 1023, 52)

    def generate(context, builder, signature, args):
        from llvmlite import ir

        integer = ir.IntType(width)
        bits = builder.bitcast(args[0], integer)
        bits = builder.shl(builder.add(bits, integer(exponent_bias)), integer(mantissa_bits))
        return builder.bitcast(bits, args[0].type)

    return t(t), generate


def exp_negative(x):
    """exp(x) for x <= 0, to about one unit in the last place; below the smallest normal number it stays there.

    x = k ln 2 + r with |r| <= ln 2 / 2, a Taylor polynomial for exp(r), and the exponent set to k. Written out because
    the mathematical library's exponential does not vectorise.
    """


@overload(exp_negative, inline="always")
def _exp_negative(x):
    double = x == types.float64
    number: Any = np.float64 if double else np.float32
    lowest = number(-708.0 if double else -87.0)
    magic = number(1.5 * 2.0 ** (52 if double else 23))
    # ln 2 in two parts, the first with so few bits that its product with k is exact
    high = number(0.6931471803691238 if double else 0.693359375)
    low = number(1.9082149292705877e-10 if double else -2.1219444005469057e-4)
    per_ln2, one = number(1.0 / math.log(2.0)), number(1.0)
    c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, c13 = (number(1.0 / math.factorial(k)) for k in range(2, 14))

    def implementation(x):
        x = lowest if x < lowest else x  # a NaN stays one
        shifted = x * per_ln2 + magic
        k = shifted - magic
        r = (x - k * high) - k * low
        p = c7
        if double:
            p = (((((c13 * r + c12) * r + c11) * r + c10) * r + c9) * r + c8) * r + c7
        p = ((((((p * r + c6) * r + c5) * r + c4) * r + c3) * r + c2) * r + one) * r + one
        return p * power_of_two(shifted)  # type: ignore[call-arg]

    return implementation


# ---------------------------------------------------------------------------------------------- one row, one step


@part
def affine(x, scale, shift, y):
    for j in range(x.size):
        y[j] = x[j] * scale[j] + shift[j]


@part
def charge(y, v, h, p):
    rest, factor = p.rest, p.factor
    if p.charge == CHARGE_ADD:
        for j in range(h.size):
            h[j] = v[j] + y[j]
    elif p.charge == CHARGE_DIVIDE:
        for j in range(h.size):
            h[j] = v[j] + (y[j] - (v[j] - rest)) / factor
    elif p.charge == CHARGE_SCALE:
        for j in range(h.size):
            h[j] = v[j] + (y[j] - (v[j] - rest)) * factor
    elif p.charge == LEAK_DIVIDE:
        for j in range(h.size):
            h[j] = v[j] - (v[j] - rest) / factor + y[j]
    else:
        for j in range(h.size):
            h[j] = v[j] - (v[j] - rest) * factor + y[j]


@part
def reset(h, v, p):
    rest, threshold = p.rest, p.threshold
    if p.hard:
        for j in range(h.size):
            v[j] = rest if h[j] >= threshold else h[j]
    else:
        for j in range(h.size):
            v[j] = h[j] - threshold if h[j] >= threshold else h[j]


@part
def fire(h, spikes, p):
    threshold, zero, one = p.threshold, p.zero, p.one
    for j in range(h.size):
        spikes[j] = one if h[j] >= threshold else zero


@part
def fire_backward(h, g_spike, g_v, g_x, p):
    """From the gradients of spike and potential after the step to those of its input and the potential before it."""
    threshold, kept, jump, slide = p.threshold, p.kept, p.jump, p.slide
    slope, amplitude, into, through, one = p.slope, p.amplitude, p.into, p.through, p.one
    if p.surrogate == SIGMOID:
        for j in range(h.size):
            e = exp_negative(-abs((h[j] - threshold) * slope))
            surrogate = amplitude * e / ((one + e) * (one + e))
            direct = kept if h[j] >= threshold else one
            g_h = (g_spike[j] + g_v[j] * (jump - slide * h[j])) * surrogate + g_v[j] * direct
            g_x[j] = g_h * into
            g_v[j] = g_h * through
    else:
        for j in range(h.size):
            u = (h[j] - threshold) * slope
            surrogate = amplitude / (one + u * u)
            direct = kept if h[j] >= threshold else one
            g_h = (g_spike[j] + g_v[j] * (jump - slide * h[j])) * surrogate + g_v[j] * direct
            g_x[j] = g_h * into
            g_v[j] = g_h * through


@part
def factor_backward(h, v, g_x, total, p):
    """Adds up what the gradient of the charging factor q needs, v being the potential before the step.

    With decaying input h - v = q (x - (v - rest)) and g_x = q g_h; otherwise g_x = g_h. The caller divides by q^2.
    """
    rest = p.rest
    if p.charge == CHARGE_SCALE:
        for j in range(h.size):
            total[j] += g_x[j] * (h[j] - v[j])
    else:
        for j in range(h.size):
            total[j] -= g_x[j] * (v[j] - rest)


@part
def backward_through_time(h, v_first, g_spikes, low, g_v, g_x, low_x, n, row, v, total, p):
    """All steps of a block in reverse.

    ``h [T, >= n]``: potentials before firing. Of ``g_spikes [T, M]`` and ``g_x [T or 1, M]`` the ``n`` columns from
    ``low`` and ``low_x`` on are used; a single row of ``g_x`` receives the sum over the steps. ``g_v [n]`` holds the
    gradient of the last potential before, that of the first one after. ``row, v [>= n]`` are scratch.
    """
    steps = h.shape[0]
    repeated = g_x.shape[0] != steps
    for t in range(steps - 1, -1, -1):
        target = row[:n] if repeated else g_x[t, low_x : low_x + n]
        fire_backward(h[t, :n], g_spikes[t, low : low + n], g_v, target, p)
        if p.learn:
            if t > 0:
                reset(h[t - 1, :n], v[:n], p)
                factor_backward(h[t, :n], v[:n], target, total, p)
            else:
                factor_backward(h[t, :n], v_first, target, total, p)
        if repeated and t == steps - 1:
            g_x[0, low_x : low_x + n] = target
        elif repeated:
            add(g_x[0, low_x : low_x + n], target)


@part
def add(a, b):
    for j in range(a.size):
        a[j] += b[j]


@part
def norm_sums(g_y, x, mean, sum_g, sum_gx):
    for j in range(g_y.size):
        sum_g[j] += g_y[j]
        sum_gx[j] += g_y[j] * (x[j] - mean[j])


@part
def fold(wide, channels, out):
    """Sums the pixels of a tiled row: ``wide [k * C]`` -> ``out [C]`` in double precision."""
    out[:] = 0.0
    for start in range(0, wide.size, channels):
        piece = wide[start : start + channels]
        for c in range(channels):
            out[c] += piece[c]


# ------------------------------------------------------------------------------------------------------ the neuron


@kernel
def neuron_forward(x, v_first, spikes, v_last, p, width, first, last):
    """``x, spikes [T, M]``; ``v_first, v_last [M]``; a unit of work is one block."""
    h = np.empty(width, x.dtype)
    for block in range(first, last):
        low, high = block * width, min((block + 1) * width, x.shape[1])
        row, v = h[: high - low], v_last[low:high]
        v[:] = v_first[low:high]
        for t in range(x.shape[0]):
            charge(x[t, low:high], v, row, p)
            fire(row, spikes[t, low:high], p)
            reset(row, v, p)


@kernel
def neuron_backward(x, v_first, g_spikes, g_v, g_x, totals, p, width, first, last):
    """``g_v [M]``: gradient of the last potential before, that of the first after; ``totals [blocks]``."""
    steps = x.shape[0]
    h = np.empty((steps, width), x.dtype)
    v, total = np.empty(width, x.dtype), np.empty(width, x.dtype)
    for block in range(first, last):
        low, high = block * width, min((block + 1) * width, x.shape[1])
        n = high - low
        v[:n] = v_first[low:high]
        for t in range(steps):
            charge(x[t, low:high], v[:n], h[t, :n], p)
            reset(h[t, :n], v[:n], p)
        total[:] = p.zero
        backward_through_time(h, v_first[low:high], g_spikes, low, g_v[low:high], g_x, low, n, v, v, total[:n], p)
        totals[block] = sum_all(total)


@part
def sum_all(values):
    result = 0.0
    for j in range(values.size):
        result += values[j]
    return result


# -------------------------------------------------------------------------------------------------------- the norm


@kernel
def norm_statistics(x, channels, width, blocks, means, squares, first, last):
    """Mean and sum of squared deviations per channel for each unit of ``blocks`` blocks of the flat ``x``.

    Two passes over a unit while it is in the cache; the caller merges ``means, squares [units, C]`` exactly.
    """
    wide, centre = np.empty(width, x.dtype), np.empty(width, x.dtype)
    for unit in range(first, last):
        low, high = unit * blocks * width, min((unit + 1) * blocks * width, x.size)
        wide[:] = 0
        for start in range(low, high, width):
            row = x[start : min(start + width, high)]
            for j in range(row.size):
                wide[j] += row[j]
        fold(wide, channels, means[unit])
        pixels = (high - low) // channels
        for c in range(channels):
            means[unit, c] /= pixels
        for start in range(0, width, channels):
            for c in range(channels):
                centre[start + c] = means[unit, c]
        wide[:] = 0
        for start in range(low, high, width):
            row = x[start : min(start + width, high)]
            for j in range(row.size):
                deviation = row[j] - centre[j]
                wide[j] += deviation * deviation
        fold(wide, channels, squares[unit])


@kernel
def norm_neuron_forward(x, scale, shift, spikes, p, width, first, last):
    """``x [X, M]``, ``spikes [T, M]``, ``scale, shift [width]``; a unit of work is one block."""
    v, y, h = np.empty(width, x.dtype), np.empty(width, x.dtype), np.empty(width, x.dtype)
    for block in range(first, last):
        low, high = block * width, min((block + 1) * width, x.shape[1])
        n = high - low
        v[:] = p.rest
        for t in range(spikes.shape[0]):
            if t < x.shape[0]:
                affine(x[t, low:high], scale[:n], shift[:n], y[:n])
            charge(y[:n], v[:n], h[:n], p)
            fire(h[:n], spikes[t, low:high], p)
            reset(h[:n], v[:n], p)


@kernel
def norm_neuron_backward(x, g_spikes, scale, shift, mean, g_y, sums, channels, p, width, blocks, first, last):
    """The gradient ``g_y [X, M]`` of the normalised input from ``g_spikes [T, M]``.

    Each unit of ``blocks`` blocks fills one of ``sums [units, 3, C]``: of g_y, of g_y (x - mean), and what
    :func:`factor_backward` adds up.
    """
    steps = g_spikes.shape[0]
    h = np.empty((steps, width), x.dtype)
    v, y, g_v = np.empty(width, x.dtype), np.empty(width, x.dtype), np.empty(width, x.dtype)
    rest = np.full(width, p.rest)
    wide = np.empty((3, width), x.dtype)
    for unit in range(first, last):
        wide[:] = 0
        for low in range(unit * blocks * width, min((unit + 1) * blocks * width, x.shape[1]), width):
            high = min(low + width, x.shape[1])
            n = high - low
            v[:] = p.rest
            g_v[:] = p.zero
            for t in range(steps):
                if t < x.shape[0]:
                    affine(x[t, low:high], scale[:n], shift[:n], y[:n])
                charge(y[:n], v[:n], h[t, :n], p)
                reset(h[t, :n], v[:n], p)
            backward_through_time(h, rest[:n], g_spikes, low, g_v[:n], g_y, low, n, y, v, wide[2, :n], p)
            for t in range(x.shape[0]):
                norm_sums(g_y[t, low:high], x[t, low:high], mean[:n], wide[0, :n], wide[1, :n])
        for k in range(3):
            fold(wide[k], channels, sums[unit, k])


@kernel
def norm_backward(x, g, scale, mean, mean_g, mean_gx, width, first, last):
    """Batch norm's input gradient, in place of ``g``; ``x, g`` flat, the rest ``[width]``; a unit is one block."""
    for block in range(first, last):
        low, high = block * width, min((block + 1) * width, x.size)
        row, target = x[low:high], g[low:high]
        for j in range(row.size):
            target[j] = scale[j] * (target[j] - mean_g[j] - (row[j] - mean[j]) * mean_gx[j])


# --------------------------------------------------------------------------------------- norm, pool 3/2/1, neuron


# Rows are split into even and odd columns first. Output column w then takes odd[w - 1], even[w] and odd[w] of each of
# three lines: three long contiguous loops a line, also when there are few channels.


@part
def split_columns(line, even, odd):
    """``line [W, C]`` -> ``even [Wo, C]`` (columns 0, 2, ...) and ``odd [Wo, C]`` (columns 1, 3, ...)."""
    for k in range((line.shape[0] + 1) // 2):
        for c in range(line.shape[1]):
            even[k, c] = line[2 * k, c]
    for k in range(line.shape[0] // 2):
        for c in range(line.shape[1]):
            odd[k, c] = line[2 * k + 1, c]


@part
def add_columns(even, odd, line):
    """The reverse of :func:`split_columns`, added to what ``line`` holds."""
    for k in range((line.shape[0] + 1) // 2):
        for c in range(line.shape[1]):
            line[2 * k, c] += even[k, c]
    for k in range(line.shape[0] // 2):
        for c in range(line.shape[1]):
            line[2 * k + 1, c] += odd[k, c]


@part
def take_larger(values, best):
    for j in range(values.size):
        best[j] = values[j] if values[j] > best[j] or values[j] != values[j] else best[j]


@part
def pool_row(image, row, scale, shift, columns, y):
    """``y [Wo * C]``: one row of the maxima of the normalised ``image [H, W, C]`` over 3x3 windows at stride 2.

    ``scale, shift [Wo * C]``; ``columns [2, Wo, C]`` is scratch.
    """
    height, width, channels = image.shape
    even, odd = columns[0].reshape(-1), columns[1].reshape(-1)
    odd_size = (width // 2) * channels
    y[:] = -np.inf
    for line in range(max(2 * row - 1, 0), min(2 * row + 2, height)):
        split_columns(image[line], columns[0], columns[1])
        affine(even, scale, shift, even)
        affine(odd[:odd_size], scale, shift, odd)
        take_larger(odd[: y.size - channels], y[channels:])
        take_larger(even, y)
        take_larger(odd[:odd_size], y)


@part
def contest(x, number, wins_ties, scale, shift, winner, tap):
    """Replaces winners, and the number of their place in the window, where ``x`` has the larger normalised value."""
    number = np.int32(number)
    if wins_ties:
        for j in range(x.size):
            wins = x[j] * scale[j] + shift[j] >= winner[j] * scale[j] + shift[j]
            winner[j] = x[j] if wins else winner[j]
            tap[j] = number if wins else tap[j]
    else:
        for j in range(x.size):
            wins = x[j] * scale[j] + shift[j] > winner[j] * scale[j] + shift[j]
            winner[j] = x[j] if wins else winner[j]
            tap[j] = number if wins else tap[j]


@part
def pool_row_winners(image, row, scale, shift, columns, winner, tap):
    """Input value and place (0 to 8) of each maximum of :func:`pool_row`; the first of equal ones, as in PyTorch.

    Begins in the centre, which is always inside the image; then whatever precedes all places seen wins ties.
    """
    height, width, channels = image.shape
    even, odd = columns[0].reshape(-1), columns[1].reshape(-1)
    odd_size = (width // 2) * channels
    for offset in (0, -1, 1):
        line = 2 * row + offset
        if line < 0 or line >= height:
            continue
        split_columns(image[line], columns[0], columns[1])
        first = 3 * (offset + 1)
        before, after = odd[: winner.size - channels], odd[:odd_size]
        if offset == 0:
            winner[:] = even
            tap[:] = 4
            contest(before, first, True, scale[channels:], shift[channels:], winner[channels:], tap[channels:])
            contest(after, first + 2, False, scale, shift, winner, tap)
            continue
        # The line above precedes all that has been seen: from right to left, each place wins ties with those before.
        # The line below follows: from left to right, none does.
        if offset < 0:
            contest(after, first + 2, True, scale, shift, winner, tap)
            contest(even, first + 1, True, scale, shift, winner, tap)
            contest(before, first, True, scale[channels:], shift[channels:], winner[channels:], tap[channels:])
        else:
            contest(before, first, False, scale[channels:], shift[channels:], winner[channels:], tap[channels:])
            contest(even, first + 1, False, scale, shift, winner, tap)
            contest(after, first + 2, False, scale, shift, winner, tap)


@part
def route(g, tap, number, target):
    zero = g[0] * 0
    for j in range(target.size):
        target[j] = g[j] if tap[j] == number else zero


@part
def route_more(g, tap, number, target):
    zero = g[0] * 0
    for j in range(g.size):
        target[j] += g[j] if tap[j] == number else zero


@part
def pool_row_backward(g, tap, row, columns, g_image):
    """Adds the gradients ``g [Wo * C]`` of one output row to the inputs that won.

    Rows go in ascending order; an input row that is reached for the first time is cleared first.
    """
    height, width, channels = g_image.shape
    even, odd = columns[0].reshape(-1), columns[1].reshape(-1)
    for line in range(max(2 * row - 1, 0), min(2 * row + 2, height)):
        if line >= 2 * row:
            g_image[line, :, :] = 0
        first = np.int32(3 * (line - 2 * row + 1))
        route(g, tap, first + 1, even)
        route(g, tap, first + 2, odd)
        route_more(g[channels:], tap[channels:], first, odd)
        add_columns(columns[0], columns[1], g_image[line])


@kernel
def pool_neuron_forward(x, scale, shift, spikes, p, first, last):
    """``x [X, N, H, W, C]``, ``spikes [T, N * Ho * Wo * C]``, ``scale, shift [Wo * C]``.

    A unit of work is one output row of one sample.
    """
    steps, width, rows = spikes.shape[0], scale.size, (x.shape[2] + 1) // 2
    v, y, h = np.empty(width, x.dtype), np.empty(width, x.dtype), np.empty(width, x.dtype)
    columns = np.empty((2, width // x.shape[4], x.shape[4]), x.dtype)
    for unit in range(first, last):
        sample, row = unit // rows, unit % rows
        v[:] = p.rest
        for t in range(steps):
            if t < x.shape[0]:
                pool_row(x[t, sample], row, scale, shift, columns, y)
            charge(y, v, h, p)
            fire(h, spikes[t, unit * width : (unit + 1) * width], p)
            reset(h, v, p)


@kernel
def pool_neuron_backward(x, g_spikes, scale, shift, mean, g_y, sums, p, first, last):
    """As :func:`norm_neuron_backward`, with ``g_y`` shaped like ``x [X, N, H, W, C]`` and ``g_spikes [T, M]``.

    A unit of work is one sample, because the windows of neighbouring output rows share inputs.
    """
    steps, width, rows = g_spikes.shape[0], scale.size, (x.shape[2] + 1) // 2
    inputs, channels = x.shape[0], x.shape[4]
    h, g_pooled = np.empty((steps, width), x.dtype), np.empty((inputs, width), x.dtype)
    winner, tap = np.empty((inputs, width), x.dtype), np.empty((inputs, width), np.int32)
    v, y, g_v = np.empty(width, x.dtype), np.empty(width, x.dtype), np.empty(width, x.dtype)
    rest = np.full(width, p.rest)
    columns = np.empty((2, width // channels, channels), x.dtype)
    wide = np.empty((3, width), x.dtype)
    for sample in range(first, last):
        wide[:] = 0
        for row in range(rows):
            v[:] = p.rest
            g_v[:] = p.zero
            for t in range(steps):
                if t < inputs:
                    pool_row_winners(x[t, sample], row, scale, shift, columns, winner[t], tap[t])
                    affine(winner[t], scale, shift, y)
                charge(y, v, h[t], p)
                reset(h[t], v, p)
            low = (sample * rows + row) * width
            backward_through_time(h, rest, g_spikes, low, g_v, g_pooled, 0, width, y, v, wide[2], p)
            for t in range(inputs):
                norm_sums(g_pooled[t], winner[t], mean, wide[0], wide[1])
                pool_row_backward(g_pooled[t], tap[t], row, columns, g_y[t, sample])
        for k in range(3):
            fold(wide[k], channels, sums[sample, k])
