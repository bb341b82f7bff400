"""What a block of neurons is fed in a time step, and all its steps again for a backward.

A block is a tensor of places in one time step of the output, `[N, ..., C]` in memory, with the channels fastest.
`norm` points to rows of C numbers: what the input is multiplied by, what is then added, and the mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megasnn.kernels.triton.neuron import charge, reset
from megasnn.kernels.triton.pool import pooled, window_of


@triton.jit
def of_channel(norm, row: tl.constexpr, place, inside, channels):
    """That row's number for the channel of each place."""
    return tl.load(norm + row * channels + place % channels, mask=inside, other=0)


@triton.jit
def current(x, place, inside, norm, channels, height, width, POOL: tl.constexpr, D: tl.constexpr):
    """What one time step feeds into the neurons; the input value it comes from; and the place of that in its window.

    Args:
        x: that time step. norm: None where the input is fed as it is.
    """
    tap = 0
    if norm is None:
        value = tl.load(x + place, mask=inside, other=0).to(D)
        y = value
    else:
        scale, shift = of_channel(norm, 0, place, inside, channels), of_channel(norm, 1, place, inside, channels)
        if POOL:
            row, column, start = window_of(place, channels, height, width)
            y, value, tap = pooled(x, inside, row, column, start, scale, shift, channels, height, width, D)
        else:
            value = tl.load(x + place, mask=inside, other=0).to(D)
            y = value * scale + shift
    return y, value, tap


@triton.jit
def first_potential(v_first, place, inside, N: tl.constexpr, D: tl.constexpr):
    if v_first is None:
        v = tl.full(place.shape, N.rest, D)
    else:
        v = tl.load(v_first + place, mask=inside, other=0).to(D)
    return v


@triton.jit
def recomputed(x, place, inside, norm, v, q, taps, size, in_size, channels, height, width,
               T: tl.constexpr, REPEATED: tl.constexpr, POOL: tl.constexpr, N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Of all steps the potential before firing, and of pooled input the values that won; their places go to `taps`."""
    h = ()
    winners = ()
    for t in tl.static_range(T):
        if t == 0 or not REPEATED:
            y, value, tap = current(x, place, inside, norm, channels, height, width, POOL, D)
            if POOL:
                tl.store(taps + place, tap.to(tl.uint8), mask=inside)
                winners = winners + (value,)
                taps += size
            x += in_size
        h_t = charge(y, v, q, N)
        v = reset(h_t, N)
        h = h + (h_t,)
    return h, winners
