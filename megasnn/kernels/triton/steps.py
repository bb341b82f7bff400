"""Input of a block of neurons in a time step, and all its steps again for a backward.

A block is a tensor of places in one time step of the output, `[N, ..., C]` in memory, with the channels fastest.
`norm` points to rows of C numbers: what the input is multiplied by, what is then added, and the mean. They are loaded
once for all time steps: between stores the compiler would load them again. For a backward there are two rows more, what
`norm_backward` subtracts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megasnn.kernels.triton.neuron import charge, reset


@triton.jit
def of_channel(norm, row: tl.constexpr, place, inside, channels):
    """Number in that row for the channel of each place."""
    return tl.load(norm + row * channels + place % channels, mask=inside, other=0)


@triton.jit
def first_potential(v_first, place, inside, N: tl.constexpr, D: tl.constexpr):
    if v_first is None:
        v = tl.full(place.shape, N.rest, D)
    else:
        v = tl.load(v_first + place, mask=inside, other=0).to(D)
    return v


@triton.jit
def fed(x, place, inside, scale, shift, D: tl.constexpr):
    """Input that one time step of `x` feeds into the neurons; without `scale` the input as it is."""
    y = tl.load(x + place, mask=inside, other=0).to(D)
    if scale is not None:
        y = y * scale + shift
    return y


@triton.jit
def one_more(row, x):
    return row + (x,)


@triton.jit
def at_step(x, t: tl.constexpr, size, REPEATED: tl.constexpr):
    """Time step of x; of what is repeated the only one."""
    if not REPEATED:
        x += tl.full((), t, tl.int64) * size
    return x


@triton.jit
def recomputed(x, place, inside, scale, shift, v, q, size, BEGIN: tl.constexpr, END: tl.constexpr,
               REPEATED: tl.constexpr, N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """The potentials before firing of the steps from BEGIN to before END. Args: v: the potential before those."""
    h = ()
    for t in tl.static_range(BEGIN, END):
        if t == BEGIN or not REPEATED:
            y = fed(at_step(x, t, size, REPEATED), place, inside, scale, shift, D)
        h_t = charge(y, v, q, N)
        v = reset(h_t, N)
        h = one_more(h, h_t)
    return h


@triton.jit
def keep_chunk_starts(x, place, inside, scale, shift, v, q, size, kept, T: tl.constexpr, CHUNK: tl.constexpr,
                      REPEATED: tl.constexpr, N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Keeps the potential before each chunk but the last in `kept [(T - 1) // CHUNK, size]`, and returns the last's."""
    for _ in range((T - 1) // CHUNK):
        tl.store(kept + place, v, mask=inside)
        for t in tl.static_range(CHUNK):
            if t == 0 or not REPEATED:
                y = fed(at_step(x, t, size, REPEATED), place, inside, scale, shift, D)
            v = reset(charge(y, v, q, N), N)
        x = at_step(x, CHUNK, size, REPEATED)
        kept += size
    tl.debug_barrier()  # another thread may read what one has written
    return v


@triton.jit
def norm_backward(g, value, scale, mean, mean_g, mean_gx):
    """From the gradient of the norm's output to that of its input; without `mean` that did not shape the statistics."""
    if mean is not None:
        g = g - mean_g - (value - mean) * mean_gx
    return scale * g
