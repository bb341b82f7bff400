"""Neighbouring neurons through all time steps, forward and backward.

Arrays with time steps are `[T, ...]`. An input `[1, ...]` is repeated at every step, and its gradient is summed over
them. `norm [3, >= n]`: scale, shift and mean for each neuron's channel; None without a norm. Potentials are
`[1, ...]`; None at rest, or where the last potential is not wanted. numba leaves out branches on a None argument.
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
from megasnn.kernels.numba.step import (
    charged,
    factor_gradient,
    fired,
    potential_gradient,
    spike_gradient,
    surrogate_gradient,
)

# Lanes run all steps before the next lanes start, so that potentials, their gradients, sums and coefficients stay in
# registers. The next values lie in as many rows of memory as there are steps. Hardware prefetchers cannot track so many
# streams, so the loop prefetches.
LANES = VECTOR_BYTES // 4  # the most lanes of a value: those of float32
AHEAD = 256  # neurons between a load and its prefetch
_LARGE = 4 * 2**20  # bytes: larger arrays leave the L2 cache before they are read


@part
def large(array):
    """Whether to write past the caches."""
    # A cache would first read the memory that is overwritten.
    return array.size * array.itemsize >= _LARGE


@part
def fire_run(x, from_x, norm, v_first, v_last, spikes, low, n, bits, p):
    """Runs `n` neurons: inputs from column `from_x` on, potentials and spikes from column `low` on.

    `bits`: all spikes packed, where each row begins a byte; otherwise empty.
    """
    many = lanes_of(p.rest)
    one = lane_of(p.rest)
    whole = n - n % count_of(many)
    past = large(spikes)
    fire_lanes(many, 0, whole, x, from_x, norm, v_first, v_last, spikes, low, bits, p, past)
    fire_lanes(one, whole, n, x, from_x, norm, v_first, v_last, spikes, low, bits, p, past)
    # Streamed stores have no order of their own, and another thread may read the spikes next.
    ordered()
    if bits.size > 0 and whole < n:
        for t in range(spikes.shape[0]):
            pack(spikes[t, low + whole : low + n], bits[(t * spikes.shape[1] + low + whole) // 8 :])


@part
def fire_lanes(like, first, last, x, at_x, norm, v_first, v_last, spikes, at, bits, p, past):
    for j in range(first, last, count_of(like)):
        # `like` is the rest potential in every lane; scale and shift only need a type.
        scale = like
        shift = like
        v = like
        if norm is not None:
            scale = load(norm, 0, j, like)
            shift = load(norm, 1, j, like)
        if v_first is not None:
            v = load(v_first, 0, at + j, like)
        for t in range(spikes.shape[0]):
            row = min(t, x.shape[0] - 1)
            prefetch(x, row, at_x + j + AHEAD, like)
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
    """Takes a multiple of 8 spikes."""
    for i in range(spikes.size // 8):
        byte = 0
        for k in range(8):
            byte |= (spikes[8 * i + k] != 0) << k
        bits[i] = byte


@part
def back(x, from_x, norm, v_first, g_spikes, low, n, g_v, g_x, sums, p, scratch):
    """Runs `n` neurons backward: `g_spikes` from column `low` on; x, potentials, g_x from `from_x` on.

    `g_v` holds the last potential's gradient, and afterwards the first's. `sums [3, >= n]` grows by g_x and
    g_x (x - mean) with a norm, and by `factor_gradient` with a learned factor. `scratch [2 T, LANES]`.
    """
    many = lanes_of(p.rest)
    one = lane_of(p.rest)
    whole = n - n % count_of(many)
    past = large(g_x) and x.shape[0] == g_spikes.shape[0]
    lanes_back(many, 0, whole, x, from_x, norm, v_first, g_spikes, low, g_v, g_x, sums, p, scratch, past)
    lanes_back(one, whole, n, x, from_x, norm, v_first, g_spikes, low, g_v, g_x, sums, p, scratch, past)
    ordered()


@part
def lanes_back(like, first, last, x, at_x, norm, v_first, g_spikes, at, g_v, g_x, sums, p, scratch, past):
    steps = g_spikes.shape[0]
    input_steps = x.shape[0]
    for j in range(first, last, count_of(like)):
        # `like` is the rest potential in every lane; the coefficients only need a type.
        scale = like
        shift = like
        mean = like
        first_v = like
        g_potential = filled(p.zero, like)
        sum_g = filled(p.zero, like)
        sum_gx = filled(p.zero, like)
        if norm is not None:
            scale = load(norm, 0, j, like)
            shift = load(norm, 1, j, like)
            mean = load(norm, 2, j, like)
            sum_g = load(sums, 0, j, like)
            sum_gx = load(sums, 1, j, like)
        if v_first is not None:
            first_v = load(v_first, 0, at_x + j, like)
        if g_v is not None:
            g_potential = load(g_v, 0, at_x + j, like)
        v = first_v
        # Potentials before firing, computed again, go to row t of `scratch`.
        for t in range(steps):
            row = min(t, input_steps - 1)
            prefetch(x, row, at_x + j + AHEAD, like)
            prefetch(g_spikes, t, at + j + AHEAD, like)
            y = load(x, row, at_x + j, like)
            if norm is not None:
                y = y * scale + shift
            h = charged(y, v, p.charge)
            store(scratch, t, 0, h)
            v = after(h, p)
        # Surrogate gradients, which do not wait for each other, go to row T + t.
        for t in range(steps):
            above = load(scratch, t, 0, like) - p.threshold
            store(scratch, steps + t, 0, surrogate_gradient(above, p.surrogate, p.one))
        for t in range(steps - 1, -1, -1):
            row = min(t, input_steps - 1)
            h = load(scratch, t, 0, like)
            direct = potential_gradient(g_potential, h, p.threshold, p.zero, p.reset)
            upstream = spike_gradient(load(g_spikes, t, at + j, like), g_potential, h, p.path)
            g_h = multiply_add(upstream, load(scratch, steps + t, 0, like), direct)
            g = g_h * p.into
            g_potential = g_h * p.through
            if norm is not None:
                sum_g = sum_g + g
                sum_gx = sum_gx + g * (load(x, row, at_x + j, like) - mean)
            if p.learn:
                before = after(load(scratch, t - 1, 0, like), p) if t > 0 else first_v
                store(sums, 2, j, load(sums, 2, j, like) + factor_gradient(h, before, g, p.charge))
            if input_steps < steps and t < steps - 1:
                g = load(g_x, row, at_x + j, like) + g
            stream(g_x, row, at_x + j, g, past)
        if norm is not None:
            store(sums, 0, j, sum_g)
            store(sums, 1, j, sum_gx)
        if g_v is not None:
            store(g_v, 0, at_x + j, g_potential)


@part
def after(h, p):
    return where(h >= p.threshold, fired(h, p.reset), h)
