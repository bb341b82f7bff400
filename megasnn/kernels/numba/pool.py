"""Kernels of norm, max pooling (3 x 3, stride 2, padding 1) and neurons."""

from __future__ import annotations

import numpy as np

from megasnn.kernels.numba.coefficients import repeated
from megasnn.kernels.numba.jit import kernel, part
from megasnn.kernels.numba.loops import fold
from megasnn.kernels.numba.time_loop import LANES, back, fire_run

# Rows are first split into even and odd columns. Output column w then takes odd[w - 1], even[w] and odd[w] of three
# lines. That makes three long contiguous loops a line, also with few channels.


@part
def scale_and_shift(x, scale, shift, y):
    for j in range(x.size):
        y[j] = x[j] * scale[j] + shift[j]


@part
def split_columns(line, even, odd):
    """`line [W, C]` -> `even [Wo, C]` (columns 0, 2, ...) and `odd [Wo, C]` (columns 1, 3, ...)."""
    for k in range((line.shape[0] + 1) // 2):
        for c in range(line.shape[1]):
            even[k, c] = line[2 * k, c]
    for k in range(line.shape[0] // 2):
        for c in range(line.shape[1]):
            odd[k, c] = line[2 * k + 1, c]


@part
def add_columns(even, odd, line):
    """The reverse of `split_columns`, added to `line`."""
    for k in range((line.shape[0] + 1) // 2):
        for c in range(line.shape[1]):
            line[2 * k, c] += even[k, c]
    for k in range(line.shape[0] // 2):
        for c in range(line.shape[1]):
            line[2 * k + 1, c] += odd[k, c]


@part
def take_larger(values, best):
    # A NaN wins, as in PyTorch.
    for j in range(values.size):
        best[j] = values[j] if values[j] > best[j] or values[j] != values[j] else best[j]


@part
def pool_row(image, middle, scale, shift, columns, y):
    """One row of maxima, `y [Wo * C]`: windows in the normalised `image [H, W, C]` around row `middle`.

    `scale, shift [Wo * C]`; `columns [2, Wo, C]` is scratch.
    """
    height, width, channels = image.shape
    even = columns[0].reshape(-1)
    odd = columns[1].reshape(-1)
    odd_size = (width // 2) * channels
    y[:] = -np.inf  # padding never wins
    for line in range(max(middle - 1, 0), min(middle + 2, height)):
        split_columns(image[line], columns[0], columns[1])
        scale_and_shift(even, scale, shift, even)
        scale_and_shift(odd[:odd_size], scale, shift, odd)
        take_larger(odd[: y.size - channels], y[channels:])
        take_larger(even, y)
        take_larger(odd[:odd_size], y)


@part
def contest(x, number, scale, shift, winner, tap):
    """Replaces winners and their places where `x`, at place `number`, has the larger normalised value."""
    number = np.int32(number)
    # The first of equal values wins, as in PyTorch, if places 0 to 3 are seen in descending and places 5 to 8 in
    # ascending order: the former win ties with all places seen before, the latter with none.
    wins_ties = number < 4
    for j in range(x.size):
        mine = x[j] * scale[j] + shift[j]
        best = winner[j] * scale[j] + shift[j]
        wins = (mine > best) | (wins_ties & (mine == best))
        winner[j] = x[j] if wins else winner[j]
        tap[j] = number if wins else tap[j]


@part
def pool_row_winners(image, middle, scale, shift, columns, winner, tap):
    """Each `pool_row` maximum's input value and place (0 to 8)."""
    height, width, channels = image.shape
    even = columns[0].reshape(-1)
    odd = columns[1].reshape(-1)
    size = winner.size
    for offset in (0, -1, 1):  # the centre of a window is always inside the image
        line = middle + offset
        if line < 0 or line >= height:
            continue
        split_columns(image[line], columns[0], columns[1])
        if offset == 0:
            # Not `winner[:] = even`: numba would compile the text of an error about shapes, for two seconds.
            for j in range(size):
                winner[j] = even[j]
                tap[j] = 4
        for k in range(3):
            column = 2 - k if offset < 0 else k
            if offset == 0 and column == 1:
                continue
            start = channels if column == 0 else 0
            count = (size - channels, size, (width // 2) * channels)[column]
            values = even[:count] if column == 1 else odd[:count]
            number = 3 * (offset + 1) + column
            contest(values, number, scale[start:], shift[start:], winner[start:], tap[start:])


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
def pool_row_backward(g, tap, middle, columns, g_image):
    """Adds an output row's gradients `g [Wo * C]` to the winning inputs; rows come in ascending order."""
    height, width, channels = g_image.shape
    even = columns[0].reshape(-1)
    odd = columns[1].reshape(-1)
    for line in range(max(middle - 1, 0), min(middle + 2, height)):
        if line >= middle or line == 0:  # no earlier output row has reached this line
            g_image[line, :, :] = 0
        first = np.int32(3 * (line - middle + 1))
        route(g, tap, first + 1, even)
        route(g, tap, first + 2, odd)
        route_more(g[channels:], tap[channels:], first, odd)
        add_columns(columns[0], columns[1], g_image[line])


@kernel
def fire_pooled(x, above, coefficients, spikes, bits, p, width, first, last):
    """Spikes `[T, N * Ho * Wo * C]` of `x [X, N, H, W, C]`; a work slice is one output row in one sample.

    `width`: Wo * C; `above` is the image row in the first windows' middle.
    """
    input_steps = x.shape[0]
    channels = x.shape[4]
    norm = repeated(coefficients, 2, width, x)
    rows = (x.shape[2] - above + 1) // 2
    y = np.empty((input_steps, width), x.dtype)
    columns = np.empty((2, width // channels, channels), x.dtype)
    for index in range(first, last):
        sample = index // rows
        row = index % rows
        for t in range(input_steps):
            pool_row(x[t, sample], 2 * row + above, norm[0], norm[1], columns, y[t])
        fire_run(y, 0, None, None, None, spikes, index * width, width, bits, p)


@kernel
def pooled_backward(x, above, g_spikes, coefficients, g_y, sums, p, width, first, last):
    """As `loops.block_backward`, with `g_y` shaped like `x [X, N, H, W, C]`."""
    # A slice of work is one sample, because the windows of neighbouring output rows share inputs.
    input_steps = x.shape[0]
    channels = x.shape[4]
    norm = repeated(coefficients, 3, width, x)
    rows = (x.shape[2] - above + 1) // 2
    scratch = np.empty((2 * g_spikes.shape[0], LANES), x.dtype)
    g_pooled = np.empty((input_steps, width), x.dtype)
    winner = np.empty((input_steps, width), x.dtype)
    tap = np.empty((input_steps, width), np.int32)
    columns = np.empty((2, width // channels, channels), x.dtype)
    wide = np.empty((3, width), x.dtype)
    for sample in range(first, last):
        wide[:] = 0
        for row in range(rows):
            for t in range(input_steps):
                pool_row_winners(x[t, sample], 2 * row + above, norm[0], norm[1], columns, winner[t], tap[t])
            low = (sample * rows + row) * width
            back(winner, 0, norm, None, g_spikes, low, width, None, g_pooled, wide, p, scratch)
            for t in range(input_steps):
                pool_row_backward(g_pooled[t], tap[t], 2 * row + above, columns, g_y[t, sample])
        for k in range(3):
            fold(wide[k], channels, sums[sample, k])
