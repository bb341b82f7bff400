"""Kernels of norm, max pooling (3 x 3, stride 2, padding 1) and neurons."""

from __future__ import annotations

import numpy as np

from megasnn.kernels.numba.coefficients import repeated
from megasnn.kernels.numba.jit import kernel, part
from megasnn.kernels.numba.lanes import count_of, filled, lane_of, lanes, lanes_of, load, store, where
from megasnn.kernels.numba.loops import fold
from megasnn.kernels.numba.time_loop import LANES, back, fire_run

# A window's nine pixels are taken one after another for as many channels as fit into registers, so that nothing lies in
# memory between the input and the maximum.
_SOME = 32  # bytes of a value for fewer channels


@part
def pool_row(image, width, middle, norm, y, t):
    """One row of maxima, `y[t]`: windows around row `middle` of the normalised image.

    `image [H * W, C]`, `norm [2, C]`.
    """
    channels = image.shape[1]
    many = lanes_of(image[0, 0])
    some = lanes(image[0, 0], _SOME)
    one = lane_of(image[0, 0])
    to_many = channels - channels % count_of(many)
    to_some = channels - channels % count_of(some)
    for column in range((width + 1) // 2):
        pool_lanes(many, 0, to_many, image, width, middle, column, norm, y, t)
        pool_lanes(some, to_many, to_some, image, width, middle, column, norm, y, t)
        pool_lanes(one, to_some, channels, image, width, middle, column, norm, y, t)


@part
def pool_lanes(like, first, last, image, width, middle, column, norm, y, t):
    height = image.shape[0] // width
    for c in range(first, last, count_of(like)):
        scale = load(norm, 0, c, like)
        shift = load(norm, 1, c, like)
        # Padding never wins.
        best = filled(image.dtype.type(-np.inf), like)
        for line in range(max(middle - 1, 0), min(middle + 2, height)):
            for at in range(max(2 * column - 1, 0), min(2 * column + 2, width)):
                value = load(image, line * width + at, c, like) * scale + shift
                # A NaN wins, as in PyTorch.
                best = where(value >= value, where(best < value, value, best), value)
        store(y, t, column * image.shape[1] + c, best)


@part
def pool_row_winners(image, width, middle, norm, all_taps, winners, taps, t):
    """Input values that `pool_row` takes, `winners[t]`, and their places in the windows, `taps[t]`.

    `all_taps`: the numbers of the nine places in a window, row after row.
    """
    channels = image.shape[1]
    many = lanes_of(image[0, 0])
    some = lanes(image[0, 0], _SOME)
    one = lane_of(image[0, 0])
    to_many = channels - channels % count_of(many)
    to_some = channels - channels % count_of(some)
    for column in range((width + 1) // 2):
        win_lanes(many, 0, to_many, image, width, middle, column, norm, all_taps, winners, taps, t)
        win_lanes(some, to_many, to_some, image, width, middle, column, norm, all_taps, winners, taps, t)
        win_lanes(one, to_some, channels, image, width, middle, column, norm, all_taps, winners, taps, t)


@part
def win_lanes(like, first, last, image, width, middle, column, norm, all_taps, winners, taps, t):
    height = image.shape[0] // width
    for c in range(first, last, count_of(like)):
        scale = load(norm, 0, c, like)
        shift = load(norm, 1, c, like)
        best = filled(image.dtype.type(-np.inf), like)
        # The middle of a window is always inside the image. It wins where no value is larger than -inf.
        winner = load(image, middle * width + 2 * column, c, like)
        tap = filled(all_taps[4], like)
        for line in range(max(middle - 1, 0), min(middle + 2, height)):
            for at in range(max(2 * column - 1, 0), min(2 * column + 2, width)):
                x = load(image, line * width + at, c, like)
                value = x * scale + shift
                # The first of equal values wins, as in PyTorch.
                is_larger = best < value
                winner = where(is_larger, x, winner)
                tap = where(is_larger, all_taps[3 * (line - middle + 1) + at - 2 * column + 1], tap)
                best = where(is_larger, value, best)
        store(winners, t, column * image.shape[1] + c, winner)
        store(taps, t, column * image.shape[1] + c, tap)


@part
def pool_row_backward(g, taps, t, width, middle, all_taps, g_image):
    """Adds a row of gradients, `g[t]`, to the winning inputs in `g_image [H * W, C]`. Rows ascend."""
    channels = g_image.shape[1]
    many = lanes_of(g[0, 0])
    some = lanes(g[0, 0], _SOME)
    one = lane_of(g[0, 0])
    to_many = channels - channels % count_of(many)
    to_some = channels - channels % count_of(some)
    for column in range((width + 1) // 2):
        route_lanes(many, 0, to_many, g, taps, t, width, middle, column, all_taps, g_image)
        route_lanes(some, to_many, to_some, g, taps, t, width, middle, column, all_taps, g_image)
        route_lanes(one, to_some, channels, g, taps, t, width, middle, column, all_taps, g_image)


@part
def route_lanes(like, first, last, g, taps, t, width, middle, column, all_taps, g_image):
    """Gradients of the pixels in columns 2 `column`, of one window, and 2 `column` + 1, of two windows."""
    channels = g_image.shape[1]
    height = g_image.shape[0] // width
    zero = all_taps[0]
    has_right = 2 * column + 2 < width
    has_odd = 2 * column + 1 < width
    for c in range(first, last, count_of(like)):
        at = column * channels + c
        tap = load(taps, t, at, like)
        g_winner = load(g, t, at, like)
        right_tap = filled(-all_taps[1], like)  # no tap
        g_right = g_winner
        if has_right:
            right_tap = load(taps, t, at + channels, like)
            g_right = load(g, t, at + channels, like)
        for line in range(max(middle - 1, 0), min(middle + 2, height)):
            first_tap = 3 * (line - middle + 1)
            row = line * width + 2 * column
            # An earlier output row has reached this line.
            has_earlier = line < middle and line > 0
            even = where(tap == all_taps[first_tap + 1], g_winner, zero)
            if has_earlier:
                even = load(g_image, row, c, like) + even
            store(g_image, row, c, even)
            if has_odd:
                odd = where(tap == all_taps[first_tap + 2], g_winner, zero)
                odd = odd + where(right_tap == all_taps[first_tap], g_right, zero)
                if has_earlier:
                    odd = load(g_image, row + 1, c, like) + odd
                store(g_image, row + 1, c, odd)


@kernel
def fire_pooled(x, above, coefficients, spikes, bits, p, width, first, last):
    """Spikes `[T, N * Ho * Wo * C]` of `x [X, N, H, W, C]`; a work slice is one output row in one sample.

    `width`: Wo * C; `above` is the image row in the first windows' middle.
    """
    input_steps = x.shape[0]
    across, channels = x.shape[3:]
    norm = repeated(coefficients, 2, channels, x)
    rows = (x.shape[2] - above + 1) // 2
    y = np.empty((input_steps, width), x.dtype)
    for index in range(first, last):
        sample = index // rows
        row = index % rows
        for t in range(input_steps):
            pool_row(x[t, sample].reshape(-1, channels), across, 2 * row + above, norm, y, t)
        fire_run(y, 0, None, None, None, spikes, index * width, width, bits, p)


@kernel
def pooled_backward(x, above, g_spikes, coefficients, g_y, sums, p, width, first, last):
    """As `loops.block_backward`, with `g_y` shaped like `x [X, N, H, W, C]`."""
    # A slice of work is one sample, because the windows of neighbouring output rows share inputs.
    input_steps = x.shape[0]
    across, channels = x.shape[3:]
    norm = repeated(coefficients, 2, channels, x)
    wide_norm = repeated(coefficients, 3, width, x)
    all_taps = np.arange(9).astype(x.dtype)
    rows = (x.shape[2] - above + 1) // 2
    scratch = np.empty((2 * g_spikes.shape[0], LANES), x.dtype)
    g_pooled = np.empty((input_steps, width), x.dtype)
    winners = np.empty((input_steps, width), x.dtype)
    taps = np.empty((input_steps, width), x.dtype)
    wide = np.empty((3, width), x.dtype)
    for sample in range(first, last):
        wide[:] = 0
        for row in range(rows):
            for t in range(input_steps):
                image = x[t, sample].reshape(-1, channels)
                pool_row_winners(image, across, 2 * row + above, norm, all_taps, winners, taps, t)
            low = (sample * rows + row) * width
            back(winners, 0, wide_norm, None, g_spikes, low, width, None, g_pooled, wide, p, scratch)
            for t in range(input_steps):
                g_image = g_y[t, sample].reshape(-1, channels)
                pool_row_backward(g_pooled, taps, t, across, 2 * row + above, all_taps, g_image)
        for k in range(3):
            fold(wide[k], channels, sums[sample, k])
