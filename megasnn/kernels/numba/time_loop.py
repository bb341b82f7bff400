"""Neighbouring neurons through all time steps, forward and backward.

Lanes take all steps before the next ones start: potentials, their gradients, sums and coefficients of the norm stay in
registers. What comes next lies in as many rows of memory as there are steps, more than the processor follows by itself,
and is asked for ahead.

Arrays that have time steps are `[T, ...]`; an input `[1, ...]` comes at every step, and its gradient is the sum over
them. Coefficients of the norm, `norm [3, >= n]`, are scale, shift and mean of each neuron's channel; without a norm it
is None. So are potentials `[1, ...]` of neurons that start at rest, or whose last potential nobody wants. Numba leaves
out branches on an argument that is None.
"""

from __future__ import annotations

from megasnn.kernels.numba.jit import part
from megasnn.kernels.numba.lanes import (
    VECTOR_BYTES,
    count_of,
    filled,
    lane_of,
    lanes_of,
    load,
    multiply_add,
    ordered,
    prefetch,
    store,
    store_bits,
    stream,
    where,
)
from megasnn.kernels.numba.step import charged, fired, of_factor, of_potential, of_spike, surrogate_gradient

LANES = VECTOR_BYTES // 4  # at most, of a value
_AHEAD = 256  # neurons
_LARGE = 4 * 2**20  # bytes: more than stays in an L2 cache until it is read


@part
def large(array):
    """True for arrays better written past the caches: into them, all of it would be read before it is overwritten."""
    return array.size * array.itemsize >= _LARGE


@part
def fire_run(x, from_x, norm, v_first, v_last, spikes, low, n, bits, p):
    """The `n` neurons whose inputs begin at column `from_x`, and whose potentials and spikes at column `low`.

    `bits`: all spikes packed, if every row of them begins in a byte of its own; otherwise empty.
    """
    many, one = lanes_of(p.rest), lane_of(p.rest)
    whole, past = n - n % count_of(many), large(spikes)
    fire_lanes(many, 0, whole, x, from_x, norm, v_first, v_last, spikes, low, bits, p, past)
    fire_lanes(one, whole, n, x, from_x, norm, v_first, v_last, spikes, low, bits, p, past)
    ordered()
    if bits.size > 0 and whole < n:
        for t in range(spikes.shape[0]):
            pack(spikes[t, low + whole : low + n], bits[(t * spikes.shape[1] + low + whole) // 8 :])


@part
def fire_lanes(like, first, last, x, at_x, norm, v_first, v_last, spikes, at, bits, p, past):
    for j in range(first, last, count_of(like)):
        scale, shift, v = like, like, like
        if norm is not None:
            scale, shift = load(norm, 0, j, like), load(norm, 1, j, like)
        if v_first is not None:
            v = load(v_first, 0, at + j, like)
        for t in range(spikes.shape[0]):
            row = min(t, x.shape[0] - 1)
            prefetch(x, row, at_x + j + _AHEAD, like)
            y = load(x, row, at_x + j, like)
            if norm is not None:
                y = y * scale + shift
            h = charged(y, v, p.charge)
            fires = h >= p.threshold
            stream(spikes, t, at + j, where(fires, p.one, p.zero), past)
            if bits.size > 0:
                store_bits(bits, (t * spikes.shape[1] + at + j) // 8, fires)
            v = where(fires, fired(h, p.reset), h)
        if v_last is not None:
            store(v_last, 0, at + j, v)


@part
def pack(spikes, bits):
    """A multiple of 8 of them."""
    for i in range(spikes.size // 8):
        byte = 0
        for k in range(8):
            byte |= (spikes[8 * i + k] != 0) << k
        bits[i] = byte


@part
def back(x, from_x, norm, v_first, g_spikes, low, n, g_v, g_x, sums, p, scratch):
    """All steps of `n` neurons in reverse.

    `g_spikes` begins at column `low`, `x`, potentials and `g_x` at `from_x`. `g_v`: gradient of the last potential
    before, that of the first one after. To `sums [3, >= n]` is added, over all steps: g_x and g_x (x - mean) where
    there is a norm, and what `of_factor` gives where that is learned. `scratch [2 T, LANES]`.
    """
    many, one = lanes_of(p.rest), lane_of(p.rest)
    whole, past = n - n % count_of(many), large(g_x) and x.shape[0] == g_spikes.shape[0]
    lanes_back(many, 0, whole, x, from_x, norm, v_first, g_spikes, low, g_v, g_x, sums, p, scratch, past)
    lanes_back(one, whole, n, x, from_x, norm, v_first, g_spikes, low, g_v, g_x, sums, p, scratch, past)
    ordered()


@part
def lanes_back(like, first, last, x, at_x, norm, v_first, g_spikes, at, g_v, g_x, sums, p, scratch, past):
    """First the potentials before firing once more, in row t of `scratch`; then all surrogate gradients, in row T + t,
    which do not wait for each other; then from the gradients of spike and potential after each step to those of its
    input and the potential before it.
    """
    steps, inputs = g_spikes.shape[0], x.shape[0]
    for j in range(first, last, count_of(like)):
        scale, shift, mean, first_v = like, like, like, like
        of_v, sum_g, sum_gx = filled(p.zero, like), filled(p.zero, like), filled(p.zero, like)
        if norm is not None:
            scale, shift, mean = load(norm, 0, j, like), load(norm, 1, j, like), load(norm, 2, j, like)
            sum_g, sum_gx = load(sums, 0, j, like), load(sums, 1, j, like)
        if v_first is not None:
            first_v = load(v_first, 0, at_x + j, like)
        if g_v is not None:
            of_v = load(g_v, 0, at_x + j, like)
        v = first_v
        for t in range(steps):
            row = min(t, inputs - 1)
            prefetch(x, row, at_x + j + _AHEAD, like)
            prefetch(g_spikes, t, at + j + _AHEAD, like)
            y = load(x, row, at_x + j, like)
            if norm is not None:
                y = y * scale + shift
            h = charged(y, v, p.charge)
            store(scratch, t, 0, h)
            v = after(h, p)
        for t in range(steps):
            above = load(scratch, t, 0, like) - p.threshold
            store(scratch, steps + t, 0, surrogate_gradient(above, p.surrogate, p.one))
        for t in range(steps - 1, -1, -1):
            row, h = min(t, inputs - 1), load(scratch, t, 0, like)
            direct = of_potential(of_v, h, p.threshold, p.zero, p.reset)
            upstream = of_spike(load(g_spikes, t, at + j, like), of_v, h, p.path)
            g_h = multiply_add(upstream, load(scratch, steps + t, 0, like), direct)
            g = g_h * p.into
            of_v = g_h * p.through
            if norm is not None:
                sum_g, sum_gx = sum_g + g, sum_gx + g * (load(x, row, at_x + j, like) - mean)
            if p.learn:
                before = after(load(scratch, t - 1, 0, like), p) if t > 0 else first_v
                store(sums, 2, j, load(sums, 2, j, like) + of_factor(h, before, g, p.charge))
            if inputs < steps and t < steps - 1:
                g = load(g_x, row, at_x + j, like) + g
            stream(g_x, row, at_x + j, g, past)
        if norm is not None:
            store(sums, 0, j, sum_g)
            store(sums, 1, j, sum_gx)
        if g_v is not None:
            store(g_v, 0, at_x + j, of_v)


@part
def after(h, p):
    """The potential after firing, from that before."""
    return where(h >= p.threshold, fired(h, p.reset), h)
