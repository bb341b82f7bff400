"""Max pooling (3 x 3 pixels, stride 2, padding 1) of normalised images.

Images are `[N, H, W, C]` in memory, pooled images `[N, Ho, Wo, C]`. A place in a window is 0 to 8, row after row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megasnn.kernels.triton.step import channel_values, norm_backward

# A forward pools in the kernel that fires. A backward finds the winners again in the kernel of sums; another kernel
# brings their gradients, rounded to the type of the input, back to their places.


@triton.jit
def pooled(x, place, inside, scale, shift, channels, height, width, above, D: tl.constexpr):
    """Each window's largest normalised value in a time step, its input value and its place.

    Args:
        above: the first windows' middle input row.
    """
    out_height = (height - above + 1) // 2
    out_width = (width + 1) // 2
    channel = place % channels
    pixel = place // channels
    column = 2 * (pixel % out_width) - 1
    line = pixel // out_width
    row = 2 * (line % out_height) - 1 + above
    sample = line // out_height
    start = ((sample * height + row) * width + column) * channels + channel
    best = tl.where(inside, tl.full((), float("-inf"), D), tl.full((), 0.0, D))
    winner = tl.zeros(place.shape, D)
    tap = tl.full(place.shape, 4, tl.int32)
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            valid = inside & (row + i >= 0) & (row + i < height) & (column + j >= 0) & (column + j < width)
            value = tl.load(x + start + (i * width + j) * channels, mask=valid, other=0).to(D)
            y = value * scale + shift
            # The first of equal values, and a NaN, as in PyTorch.
            wins = valid & ((y > best) | (y != y))
            best = tl.where(wins, y, best)
            winner = tl.where(wins, value, winner)
            tap = tl.where(wins, 3 * i + j, tap)
    return best, winner, tap


@triton.jit
def gradient_of_windows(g, tap, place, inside, channels, height, width, above, D: tl.constexpr):
    """For places in an input time step, the summed gradients of the windows that each has won.

    Args:
        g, tap: that time step's window gradients and winning places.
        above: the first windows' middle input row.
    """
    out_height = (height - above + 1) // 2
    out_width = (width + 1) // 2
    channel = place % channels
    pixel = place // channels
    column = pixel % width
    line = pixel // width
    row = line % height - above
    sample = line // height
    total = tl.zeros(place.shape, D)
    # A pixel of an even row lies in the middle of one row of windows. A pixel of an odd row lies below the middle of
    # one and above the middle of the next. The same holds for columns.
    for i in tl.static_range(2):
        for j in tl.static_range(2):
            # A row may be -1, and a division of negative integers rounds towards 0 on a GPU.
            window_row = (row + 2) // 2 - 1 + i
            window_column = column // 2 + j
            there = inside & (window_row >= 0) & (window_row < out_height) & (window_column < out_width)
            if i == 1:
                there = there & ((row + 2) % 2 == 1)
            if j == 1:
                there = there & (column % 2 == 1)
            window = ((sample * out_height + window_row) * out_width + window_column) * channels + channel
            mine = 3 * (row - 2 * window_row + 1) + column - 2 * window_column + 1
            won = tl.load(tap + window, mask=there, other=9).to(tl.int32) == mine
            total += tl.where(won, tl.load(g + window, mask=there, other=0).to(D), 0)
    return total


@triton.jit
def pooled_gradient_kernel(x, g_pooled, taps, g_x, norm, mean_gradients,
                           size, in_size, blocks, channels, height, width, above,
                           D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The norm's input gradient from window gradients, `[X, size]`, and their winning places."""
    step = (tl.program_id(0) // blocks).to(tl.int64)
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = place < in_size
    scale = channel_values(norm, 0, place, inside, channels)
    mean, mean_g, mean_gx = None, None, None
    if mean_gradients is not None:
        mean = channel_values(norm, 2, place, inside, channels)
        mean_g = channel_values(mean_gradients, 0, place, inside, channels)
        mean_gx = channel_values(mean_gradients, 1, place, inside, channels)
    g_pooled += step * size
    taps += step * size
    g = gradient_of_windows(g_pooled, taps, place, inside, channels, height, width, above, D)
    value = tl.load(x + step * in_size + place, mask=inside, other=0).to(D)
    g = norm_backward(g, value, scale, mean, mean_g, mean_gx)
    tl.store(g_x + step * in_size + place, g.to(g_x.dtype.element_ty), mask=inside)
