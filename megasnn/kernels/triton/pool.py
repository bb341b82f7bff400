"""Max pooling (3 x 3 pixels, stride 2, padding 1) of normalised images, inside the kernels of the unit.

Images are `[N, H, W, C]` in memory, pooled ones `[N, Ho, Wo, C]`. A place in a window is 0 to 8, row after row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def window_of(place, channels, height, width):
    """Of places in a pooled time step: row and column of the window's first pixel, and its place in the input."""
    out_height, out_width = (height + 1) // 2, (width + 1) // 2
    channel, pixel = place % channels, place // channels
    column, line = pixel % out_width, pixel // out_width
    row, sample = line % out_height, line // out_height
    row, column = 2 * row - 1, 2 * column - 1
    return row, column, ((sample * height + row) * width + column) * channels + channel


@triton.jit
def pooled(x, inside, row, column, start, scale, shift, channels, height, width, D: tl.constexpr):
    """The largest normalised value of each window, the input value it comes from, and its place in the window.

    The first of equal ones, and a NaN before any number, as in PyTorch.
    """
    best = tl.full(start.shape, float("-inf"), D)
    winner = tl.zeros(start.shape, D)
    tap = tl.full(start.shape, 4, tl.int32)
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            valid = inside & (row + i >= 0) & (row + i < height) & (column + j >= 0) & (column + j < width)
            value = tl.load(x + start + (i * width + j) * channels, mask=valid, other=0).to(D)
            y = value * scale + shift
            wins = valid & ((y > best) | (y != y))
            best = tl.where(wins, y, best)
            winner = tl.where(wins, value, winner)
            tap = tl.where(wins, 3 * i + j, tap)
    return best, winner, tap


@triton.jit
def gradient_of_windows(g, tap, place, inside, channels, height, width, D: tl.constexpr):
    """Gathers, for places in an input time step, the gradients of the windows that each has won.

    A pixel of an even row lies in the middle of one row of windows, one of an odd row below the middle of one and
    above the middle of the next; with columns alike.

    Args:
        g, tap: of the windows of that time step.
    """
    out_height, out_width = (height + 1) // 2, (width + 1) // 2
    channel, pixel = place % channels, place // channels
    column, line = pixel % width, pixel // width
    row, sample = line % height, line // height
    total = tl.zeros(place.shape, D)
    for i in tl.static_range(2):
        for j in tl.static_range(2):
            window_row, window_column = row // 2 + i, column // 2 + j
            there = inside & (window_row < out_height) & (window_column < out_width)
            if i == 1:
                there = there & (row % 2 == 1)
            if j == 1:
                there = there & (column % 2 == 1)
            window = ((sample * out_height + window_row) * out_width + window_column) * channels + channel
            mine = 3 * (row - 2 * window_row + 1) + column - 2 * window_column + 1
            won = tl.load(tap + window, mask=there, other=9).to(tl.int32) == mine
            total += tl.where(won, tl.load(g + window, mask=there, other=0), 0)
    return total
