"""Sums over time, samples and space for each channel: statistics of the norm, and what its backward needs.

Memory `[..., C]` is cut into rows of k C values, a multiple of the columns of a tile, so that threads are idle only at
the very end, whatever C is. A program adds up some tiles of one block of columns; its sums are a row of
`[programs, k C]`, which is `[programs k, C]` as well, in the type that is computed in. They are folded in double
precision, in an order that depends on nothing but sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megasnn.kernels.triton.launch import operator
from megasnn.kernels.triton.neuron import charging_factor, factor_backward, reset, step_backward
from megasnn.kernels.triton.pool import pooled
from megasnn.kernels.triton.steps import at_step, chunk_starts, first_potential, known_after, of_channel, recomputed


@operator("x", "partial")
@triton.jit
def statistics_kernel(x, partial, size, row, programs, tiles,
                      D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """`partial [2, programs, row]`: the mean of the values, and their squared deviations from it.

    Deviations are taken from the mean of the first tile: that is near enough, since it is part of what is summed.
    """
    blocks = row // COLUMNS
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    program = (tl.program_id(0) // blocks).to(tl.int64)
    start = program * (tiles * ROWS) * row
    x += start
    left = size - start
    place = tl.arange(0, ROWS)[:, None] * row + column[None, :]
    n = tl.maximum(summed_by(program, column, size, row, tiles * ROWS), 1).to(tl.float64)
    inside = place < left
    count = tl.maximum(tl.sum(inside.to(D), axis=0), 1)
    pivot = tl.sum(tl.load(x + place, mask=inside, other=0).to(D), axis=0) / count
    total, squares = tl.zeros(place.shape, D), tl.zeros(place.shape, D)
    for _ in range(tiles):
        inside = place < left
        deviation = tl.load(x + place, mask=inside, other=0).to(D) - pivot[None, :]
        deviation = tl.where(inside, deviation, 0)
        total += deviation
        squares += deviation * deviation
        x += ROWS * row
        left -= ROWS * row
    s = tl.sum(total.to(tl.float64), axis=0)
    squared = tl.sum(squares.to(tl.float64), axis=0)
    out = partial + program * row + column
    tl.store(out, (pivot.to(tl.float64) + s / n).to(D))
    tl.store(out + tl.cast(programs, tl.int64) * row, (squared - s * s / n).to(D))


@triton.jit
def summed_by(program, column, size, row, rows):
    """How many values of its columns a program sums: those before `size` in its `rows` rows of `row` values."""
    there = (size - column + row - 1) // row - program * rows
    return tl.minimum(tl.maximum(there, 0), rows)


@operator("partial", "out")
@triton.jit
def fold_statistics_kernel(partial, out, rows, channels, size, row, summed,
                           ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """`partial [2, rows, C]` of `statistics_kernel` -> `out [2, C]`: mean and biased variance.

    Args:
        summed: how many rows of `row` values a program has summed.
    """
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weighted = tl.zeros([ROWS, COLUMNS], tl.float64)
    step = tl.cast(rows, tl.int64) * channels
    parts = row // channels  # of a program: as often is each channel in its row
    for start in range(0, rows, ROWS):
        part = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        place = part * channels + channel[None, :]
        inside = (part < rows) & (channel[None, :] < channels)
        n = summed_by(part // parts, part % parts * channels + channel[None, :], size, row, summed)
        weighted += n.to(tl.float64) * tl.load(partial + place, mask=inside, other=0).to(tl.float64)
    n_all = tl.maximum(tl.cast(size, tl.int64) // channels, 1).to(tl.float64)
    mean = tl.sum(weighted, axis=0) / n_all
    squares = tl.zeros([ROWS, COLUMNS], tl.float64)
    for start in range(0, rows, ROWS):
        part = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        place = part * channels + channel[None, :]
        inside = (part < rows) & (channel[None, :] < channels)
        n = summed_by(part // parts, part % parts * channels + channel[None, :], size, row, summed)
        n = tl.where(inside, n, 0).to(tl.float64)
        away = tl.load(partial + place, mask=inside, other=0).to(tl.float64) - mean[None, :]
        squares += tl.load(partial + step + place, mask=inside, other=0).to(tl.float64) + n * away * away
    tl.store(out + channel, mean, mask=channel < channels)
    tl.store(out + channels + channel, tl.sum(squares, axis=0) / n_all, mask=channel < channels)


@operator("mean variance weight bias sums", "out")
@triton.jit
def coefficients_kernel(mean, variance, weight, bias, sums, out, count, channels,
                        EPS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The rows of `norm` in `steps` and `unit`, computed in double precision.

    Args:
        sums: `[>= 2, C]` of g and of g (x - mean), over `count` values a channel, for a backward; None for a forward.
    """
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < channels
    mu = tl.load(mean + channel, mask=inside, other=0).to(tl.float64)
    var = tl.load(variance + channel, mask=inside, other=1).to(tl.float64)
    one = tl.full((), 1.0, tl.float64)
    inverse = one / tl.sqrt(var + tl.full((), EPS, tl.float64))
    scale = inverse
    if weight is not None:
        scale = inverse * tl.load(weight + channel, mask=inside, other=0).to(tl.float64)
    shift = -mu * scale
    if bias is not None:
        shift = tl.load(bias + channel, mask=inside, other=0).to(tl.float64) - mu * scale
    number = out.dtype.element_ty
    tl.store(out + channel, scale.to(number), mask=inside)
    tl.store(out + channels + channel, shift.to(number), mask=inside)
    tl.store(out + 2 * channels + channel, mu.to(number), mask=inside)
    if sums is not None:
        per_value = one / tl.cast(count, tl.float64)
        g = tl.load(sums + channel, mask=inside, other=0) * per_value
        gx = tl.load(sums + channels + channel, mask=inside, other=0) * per_value
        tl.store(out + 3 * channels + channel, g.to(number), mask=inside)
        tl.store(out + 4 * channels + channel, (gx * inverse * inverse).to(number), mask=inside)


@operator("x g_spikes norm q", "g_pooled taps partial")
@triton.jit
def backward_sums_kernel(x, g_spikes, norm, q, g_pooled, taps, partial,
                         size, in_size, channels, height, width, above, row, programs, tiles,
                         T: tl.constexpr, CHUNK: tl.constexpr, REPEATED: tl.constexpr, POOL: tl.constexpr,
                         LEARN: tl.constexpr, N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
                         COLUMNS: tl.constexpr):  # fmt: skip
    """`partial [3, programs, row]`: sums of g, the gradient of the normalised input, of g (x - mean), and of what
    `factor_backward` gives.

    Args:
        g_pooled, taps: `[X, size]`, with POOL: where g goes, and the places in the windows that have won. A tile's
            place for g first holds the values that have won, which come back from a cache.
    """
    blocks = row // COLUMNS
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    program = tl.program_id(0) // blocks
    q = charging_factor(q, N, D)
    scale = of_channel(norm, 0, column, column < row, channels)[None, :]
    shift = of_channel(norm, 1, column, column < row, channels)[None, :]
    mean = of_channel(norm, 2, column, column < row, channels)[None, :]
    done = program * (tiles * ROWS) * row
    place = tl.arange(0, ROWS)[:, None] * row + column[None, :]
    sum_g, sum_gx, total = tl.zeros(place.shape, D), tl.zeros(place.shape, D), tl.zeros(place.shape, D)
    for _ in range(tiles):
        inside = place < size - done
        given = (g_pooled if POOL else x) + done  # one value for each neuron
        g_tile = g_spikes + done
        if POOL:
            x_t, g_t, taps_t = x, given, taps + done
            for _step in range(1 if REPEATED else T):
                _best, winner, tap = pooled(x_t, done + place, inside, scale, shift, channels, height, width, above, D)
                tl.store(g_t + place, winner.to(g_pooled.dtype.element_ty), mask=inside)
                tl.store(taps_t + place, tap.to(tl.uint8), mask=inside)
                x_t, g_t, taps_t = x_t + in_size, g_t + size, taps_t + size
            tl.debug_barrier()  # another thread may read what one has written
        first = first_potential(None, place, inside, N, D)
        starts = chunk_starts(given, place, inside, scale, shift, first, q, size, T, CHUNK, REPEATED, N, D)
        g_v = tl.zeros(place.shape, D)
        summed = tl.zeros(place.shape, D)
        for c in tl.static_range((T - 1) // CHUNK, -1, -1):
            if CHUNK < T:
                inside = known_after(inside, sum_g + sum_gx + total + starts[c])
            h = recomputed(given, place, inside, scale, shift, starts[c], q, size, c * CHUNK,
                           T if T < c * CHUNK + CHUNK else c * CHUNK + CHUNK, REPEATED, N, D)  # fmt: skip
            for i in tl.static_range(CHUNK - 1, -1, -1):
                if c * CHUNK + i < T:
                    g_spike = tl.load(at_step(g_tile, c * CHUNK + i, size, False) + place, mask=inside, other=0)
                    g, g_v = step_backward(h[i], g_spike.to(D), g_v, q, N)
                    if LEARN:
                        before = reset(h[i - 1], N) if i > 0 else starts[c]
                        total += factor_backward(h[i], before, g, N)
                    if REPEATED:
                        summed += g
                    if c + i == 0 or not REPEATED:
                        g = summed if REPEATED else g
                        given_t = at_step(given, c * CHUNK + i, size, REPEATED) + place
                        value = tl.load(given_t, mask=inside, other=0).to(D)
                        sum_g += g  # exactly 0 for places outside
                        sum_gx += g * (value - mean)
                        if POOL:
                            tl.debug_barrier()  # nobody still reads there
                            tl.store(given_t, g.to(g_pooled.dtype.element_ty), mask=inside)
        done += ROWS * row
    out = partial + program.to(tl.int64) * row + column
    step = tl.cast(programs, tl.int64) * row
    tl.store(out, tl.sum(sum_g.to(tl.float64), axis=0).to(D))
    tl.store(out + step, tl.sum(sum_gx.to(tl.float64), axis=0).to(D))
    if LEARN:
        tl.store(out + 2 * step, tl.sum(total.to(tl.float64), axis=0).to(D))
