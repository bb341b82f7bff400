"""Sums over time, samples and space per channel: norm statistics, and the norm's backward.

They must equal torch_backend.py's `statistics` and `backward_sums`. Memory `[..., C]` is cut into rows with k C values.
A program sums some tiles in one block of columns. Its sums are a row in `[programs, k C]`, which is also
`[programs k, C]`, in the arithmetic's type. They are folded in double precision.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megasnn.kernels.triton.pool import pooled
from megasnn.kernels.triton.step import (
    at_step,
    channel_values,
    charging_factor,
    factor_gradient,
    first_potential,
    keep_chunk_starts,
    recomputed,
    reset,
    step_backward,
)

# A row is a multiple of a tile's columns, so that threads are idle only at the very end for any C. The order of a sum
# depends only on sizes.


@triton.jit
def statistics_kernel(x, partial, size, row, programs, tiles,
                      D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """`partial [3, programs, row]`: mean, sum of squared deviations from it, and number of values."""
    blocks = row // COLUMNS
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    program = (tl.program_id(0) // blocks).to(tl.int64)
    start = program * (tiles * ROWS) * row
    x += start
    left = size - start
    place = tl.arange(0, ROWS)[:, None] * row + column[None, :]
    number = tl.minimum(tl.maximum((left - column + row - 1) // row, 0), tiles * ROWS)
    n = tl.maximum(number, 1).to(tl.float64)
    inside = place < left
    count = tl.maximum(tl.sum(inside.to(D), axis=0), 1)
    # Deviations are from the mean of the first tile, which is near the mean of all tiles.
    pivot = tl.sum(tl.load(x + place, mask=inside, other=0).to(D), axis=0) / count
    total = tl.zeros(place.shape, D)
    squares = tl.zeros(place.shape, D)
    # Four loads are in flight at a time: with one the program waits for memory.
    for _ in tl.range(tiles, loop_unroll_factor=4):
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
    step = tl.cast(programs, tl.int64) * row
    tl.store(out + step, (squared - s * s / n).to(D))
    tl.store(out + 2 * step, number.to(D))


@triton.jit
def inverse_deviation(variance, EPS: tl.constexpr):
    """In double precision."""
    return tl.full((), 1.0, tl.float64) / tl.sqrt(variance + tl.full((), EPS, tl.float64))


@triton.jit
def store_coefficients(out, mean, variance, weight, bias, channel, inside, channels, EPS: tl.constexpr):
    """The rows of `norm` (step.py), computed in double precision."""
    number = out.dtype.element_ty
    tl.store(out + 2 * channels + channel, mean.to(number), mask=inside)
    scale = inverse_deviation(variance, EPS)
    if weight is not None:
        scale = scale * tl.load(weight + channel, mask=inside, other=0).to(tl.float64)
    tl.store(out + channel, scale.to(number), mask=inside)
    shift = -mean * scale
    if bias is not None:
        shift = tl.load(bias + channel, mask=inside, other=0).to(tl.float64) - mean * scale
    tl.store(out + channels + channel, shift.to(number), mask=inside)


@triton.jit
def coefficients_kernel(mean, variance, weight, bias, out, channels, EPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Coefficients `out [3, C]` for statistics that are not this rank's alone."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < channels
    mu = tl.load(mean + channel, mask=inside, other=0).to(tl.float64)
    var = tl.load(variance + channel, mask=inside, other=1).to(tl.float64)
    store_coefficients(out, mu, var, weight, bias, channel, inside, channels, EPS)


@triton.jit
def fold_statistics_kernel(partial, out, weight, bias, coefficients, rows, channels, pixels, EPS: tl.constexpr,
                           ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Mean and biased variance over `pixels` values, `out [2, C]`.

    Args:
        partial: `[3, rows, C]` from `statistics_kernel`.
        coefficients: `[3, C]`, written too if given.
    """
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside_row = channel < channels
    weighted = tl.zeros([ROWS, COLUMNS], tl.float64)
    step = tl.cast(rows, tl.int64) * channels
    for start in tl.range(0, rows, ROWS, loop_unroll_factor=4):
        part = (start + tl.arange(0, ROWS))[:, None]
        place = partial + part.to(tl.int64) * channels + channel[None, :]
        inside = (part < rows) & inside_row[None, :]
        n = tl.load(place + 2 * step, mask=inside, other=0).to(tl.float64)
        weighted += n * tl.load(place, mask=inside, other=0).to(tl.float64)
    n_all = tl.cast(pixels, tl.int64).to(tl.float64)
    mean = tl.sum(weighted, axis=0) / n_all
    squares = tl.zeros([ROWS, COLUMNS], tl.float64)
    # With four loads in flight, code for compute capability 8.0 has no register left for a division.
    for start in tl.range(0, rows, ROWS, loop_unroll_factor=3):
        part = (start + tl.arange(0, ROWS))[:, None]
        place = partial + part.to(tl.int64) * channels + channel[None, :]
        inside = (part < rows) & inside_row[None, :]
        n = tl.load(place + 2 * step, mask=inside, other=0).to(tl.float64)
        away = tl.load(place, mask=inside, other=0).to(tl.float64) - mean[None, :]
        squares += tl.load(place + step, mask=inside, other=0).to(tl.float64) + n * away * away
    variance = tl.sum(squares, axis=0) / n_all
    tl.store(out + channel, mean, mask=inside_row)
    tl.store(out + channels + channel, variance, mask=inside_row)
    if coefficients is not None:
        store_coefficients(coefficients, mean, variance, weight, bias, channel, inside_row, channels, EPS)


@triton.jit
def store_mean_gradients(out, sum_g, sum_gx, inverse, count, channel, inside, channels):
    """The rows of `mean_gradients` (step.py), `out [2, C]`, from sums over `count` values a channel."""
    number = out.dtype.element_ty
    per_value = tl.full((), 1.0, tl.float64) / tl.cast(count, tl.float64)
    tl.store(out + channel, (sum_g * per_value).to(number), mask=inside)
    tl.store(out + channels + channel, (sum_gx * per_value * inverse * inverse).to(number), mask=inside)


@triton.jit
def mean_gradients_kernel(sums, variance, out, count, channels, EPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Mean gradients `out [2, C]` from all ranks' `sums [>= 2, C]`: g and g (x - mean)."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < channels
    inverse = inverse_deviation(tl.load(variance + channel, mask=inside, other=1).to(tl.float64), EPS)
    sum_g = tl.load(sums + channel, mask=inside, other=0)
    sum_gx = tl.load(sums + channels + channel, mask=inside, other=0)
    store_mean_gradients(out, sum_g, sum_gx, inverse, count, channel, inside, channels)


@triton.jit
def folded(partial, rows, channels, channel, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum over the rows of `partial [rows, C]`."""
    total = tl.zeros([ROWS, COLUMNS], tl.float64)
    for start in tl.range(0, rows, ROWS, loop_unroll_factor=4):
        part = (start + tl.arange(0, ROWS))[:, None]
        inside = (part < rows) & (channel[None, :] < channels)
        place = partial + part.to(tl.int64) * channels + channel[None, :]
        total += tl.load(place, mask=inside, other=0).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def fold_sums_kernel(partial, variance, sums, g_weight, g_bias, mean_gradients, rows, channels, count,
                     LEARN: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr,
                     COLUMNS: tl.constexpr):  # fmt: skip
    """`sums [2 or 3, C]` from `partial [2 or 3, rows, C]`, the result of `backward_sums_kernel`.

    Also writes the scale and shift gradients, if given, equal to `norm_neuron.parameter_gradients`.

    Args:
        mean_gradients: `[2, C]`, written too if given; see `store_mean_gradients`.
    """
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < channels
    step = tl.cast(rows, tl.int64) * channels
    sum_g = folded(partial, rows, channels, channel, ROWS, COLUMNS)
    sum_gx = folded(partial + step, rows, channels, channel, ROWS, COLUMNS)
    tl.store(sums + channel, sum_g, mask=inside)
    tl.store(sums + channels + channel, sum_gx, mask=inside)
    if LEARN:
        total = folded(partial + 2 * step, rows, channels, channel, ROWS, COLUMNS)
        tl.store(sums + 2 * channels + channel, total, mask=inside)
    inverse = inverse_deviation(tl.load(variance + channel, mask=inside, other=1).to(tl.float64), EPS)
    if g_bias is not None:
        tl.store(g_bias + channel, sum_g.to(g_bias.dtype.element_ty), mask=inside)
    if g_weight is not None:
        tl.store(g_weight + channel, (sum_gx * inverse).to(g_weight.dtype.element_ty), mask=inside)
    if mean_gradients is not None:
        store_mean_gradients(mean_gradients, sum_g, sum_gx, inverse, count, channel, inside, channels)


@triton.jit
def sums_of_chunk(source, g_spikes, place, inside, scale, shift, mean, start, g_v, summed, total, sum_g, sum_gx, q,
                  size, STEPS: tl.constexpr, REPEATED: tl.constexpr, POOL: tl.constexpr, LEARN: tl.constexpr,
                  N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Adds the STEPS time steps at which `source` and g_spikes point; with POOL g overwrites the source.

    Returns the potential's gradient before them, and the sums; with REPEATED the gradients go to `summed` alone.
    """
    h = recomputed(source, place, inside, scale, shift, start, q, size, 0, STEPS, REPEATED, N, D)
    for i in tl.static_range(STEPS - 1, -1, -1):
        g_spike = tl.load(at_step(g_spikes, i, size, False) + place, mask=inside, other=0)
        g, g_v = step_backward(h[i], g_spike.to(D), g_v, q, N)
        if LEARN:
            before = reset(h[i - 1], N) if i > 0 else start
            total += factor_gradient(h[i], before, g, N)
        if REPEATED:
            summed += g
        else:
            sum_g, sum_gx = summed_up(at_step(source, i, size, False), g, place, inside, mean, sum_g, sum_gx, POOL, D)
    return g_v, summed, total, sum_g, sum_gx


@triton.jit
def summed_up(source, g, place, inside, mean, sum_g, sum_gx, POOL: tl.constexpr, D: tl.constexpr):
    value = tl.load(source + place, mask=inside, other=0).to(D)
    if POOL:
        tl.debug_barrier()  # no thread still reads there
        tl.store(source + place, g.to(source.dtype.element_ty), mask=inside)
    # No mask: g is exactly 0 for places outside.
    return sum_g + g, sum_gx + g * (value - mean)


@triton.jit
def backward_sums_kernel(x, g_spikes, norm, q, g_pooled, taps, partial, kept,
                         size, in_size, channels, height, width, above, row, programs, tiles,
                         T: tl.constexpr, CHUNK: tl.constexpr, REPEATED: tl.constexpr, POOL: tl.constexpr,
                         LEARN: tl.constexpr, N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
                         COLUMNS: tl.constexpr):  # fmt: skip
    """`partial [3, programs, row]`: sums of g, g (x - mean), and `factor_gradient`.

    g is the normalised input's gradient.

    Args:
        g_pooled, taps: with POOL `[X, size]`, the result g and the winning places in the windows.
        kept: memory for `keep_chunk_starts`; None for a single chunk.
    """
    blocks = row // COLUMNS
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    program = tl.program_id(0) // blocks
    q = charging_factor(q, N, D)
    scale = channel_values(norm, 0, column, column < row, channels)[None, :]
    shift = channel_values(norm, 1, column, column < row, channels)[None, :]
    mean = channel_values(norm, 2, column, column < row, channels)[None, :]
    done = program * (tiles * ROWS) * row
    place = tl.arange(0, ROWS)[:, None] * row + column[None, :]
    sum_g = tl.zeros(place.shape, D)
    sum_gx = tl.zeros(place.shape, D)
    total = tl.zeros(place.shape, D)
    for _ in range(tiles):
        inside = place < size - done
        source = (g_pooled if POOL else x) + done  # one value for each neuron
        g_tile = g_spikes + done
        if POOL:
            x_t = x
            g_t = source
            taps_t = taps + done
            # g_pooled first holds the pooled maxima: `sums_of_chunk` reads them from the cache and writes g.
            for _step in range(1 if REPEATED else T):
                _best, winner, tap = pooled(x_t, done + place, inside, scale, shift, channels, height, width, above, D)
                tl.store(g_t + place, winner.to(g_pooled.dtype.element_ty), mask=inside)
                tl.store(taps_t + place, tap.to(tl.uint8), mask=inside)
                x_t += in_size
                g_t += size
                taps_t += size
            # Another thread may read what one has written.
            tl.debug_barrier()
        first = first_potential(None, place, inside, N, D)
        g_v = tl.zeros(place.shape, D)
        summed = tl.zeros(place.shape, D)
        last = first
        if kept is not None:
            last = keep_chunk_starts(source, place, inside, scale, shift, first, q, size, kept + done, T, CHUNK,
                                     REPEATED, N, D)  # fmt: skip
        # The last chunk comes first: it may be shorter than the others.
        BEFORE: tl.constexpr = (T - 1) // CHUNK  # chunks before the last one
        source_c = at_step(source, BEFORE * CHUNK, size, REPEATED)
        g_c = at_step(g_tile, BEFORE * CHUNK, size, False)
        g_v, summed, total, sum_g, sum_gx = sums_of_chunk(
            source_c, g_c, place, inside, scale, shift, mean, last, g_v, summed, total, sum_g, sum_gx, q, size,
            T - BEFORE * CHUNK, REPEATED, POOL, LEARN, N, D,
        )  # fmt: skip
        if kept is not None:
            kept_c = at_step(kept + done, BEFORE, size, False)
            for _c in range(BEFORE):
                source_c = at_step(source_c, -CHUNK, size, REPEATED)
                g_c = at_step(g_c, -CHUNK, size, False)
                kept_c = at_step(kept_c, -1, size, False)
                g_v, summed, total, sum_g, sum_gx = sums_of_chunk(
                    source_c, g_c, place, inside, scale, shift, mean, tl.load(kept_c + place, mask=inside, other=0),
                    g_v, summed, total, sum_g, sum_gx, q, size, CHUNK, REPEATED, POOL, LEARN, N, D,
                )  # fmt: skip
        if REPEATED:
            sum_g, sum_gx = summed_up(source, summed, place, inside, mean, sum_g, sum_gx, POOL, D)
        done += ROWS * row
    out = partial + program.to(tl.int64) * row + column
    step = tl.cast(programs, tl.int64) * row
    tl.store(out, tl.sum(sum_g.to(tl.float64), axis=0).to(D))
    tl.store(out + step, tl.sum(sum_gx.to(tl.float64), axis=0).to(D))
    if LEARN:
        tl.store(out + 2 * step, tl.sum(total.to(tl.float64), axis=0).to(D))
