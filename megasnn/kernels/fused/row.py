"""Rows of neighbouring neurons through all time steps, forward and backward.

A row is cut into pieces whose potentials stay in the L1 cache; each takes all steps before the next one starts. A step
goes from lanes to lanes, and over what is left at the end of a piece one by one. The processor does not see by itself
what comes after a piece, in another row of memory, and is asked to fetch it.

Arrays that have time steps are `[T, ...]`; an input `[1, ...]` comes at every step, and its gradient is the sum over
them. Coefficients of the norm, `norm [3, >= n]`, are scale, shift and mean of each neuron's channel; without a norm it
is None. So are potentials `[1, ...]` of neurons that start at rest, or whose last potential nobody wants.
"""

from __future__ import annotations

from numba import types

from megasnn.kernels.fused.lanes import (
    count_of,
    filled,
    lane_of,
    lanes_of,
    load,
    multiply_add,
    prefetch,
    store,
    store_bits,
    where,
)
from megasnn.kernels.fused.neuron import (
    charged,
    fired,
    of_factor,
    of_potential,
    of_spike,
    scalar,
    surrogate_gradient,
)
from megasnn.kernels.jit import part

PIECE = 1024  # neurons


@part
def fire(x, from_x, norm, v_first, v_last, spikes, low, n, bits, p, scratch):
    """The `n` neurons whose inputs begin at column `from_x`, and whose potentials and spikes at column `low`.

    `bits`: all spikes packed, if every row of them begins in a byte of its own; otherwise empty. `scratch [1, PIECE]`.
    """
    many, one = lanes_of(p.rest), lane_of(p.rest)
    for piece in range(0, n, PIECE):
        size = min(PIECE, n - piece)
        whole = size - size % count_of(many)
        at_x, at = from_x + piece, low + piece
        begin(many, 0, whole, v_first, at, scratch, 0)
        begin(one, whole, size, v_first, at, scratch, 0)
        for t in range(spikes.shape[0]):
            fire_step(many, 0, whole, t, x, at_x, norm, piece, spikes, at, bits, p, scratch)
            fire_step(one, whole, size, t, x, at_x, norm, piece, spikes, at, bits, p, scratch)
            if bits.size > 0 and whole < size:
                pack(spikes[t, at + whole : at + size], bits[(t * spikes.shape[1] + at + whole) // 8 :])
        keep(many, 0, whole, scratch, 0, v_last, at)
        keep(one, whole, size, scratch, 0, v_last, at)


@part
def fire_step(like, first, last, t, x, at_x, norm, at_norm, spikes, at, bits, p, scratch):
    row = min(t, x.shape[0] - 1)
    for j in range(first, last, count_of(like)):
        current = fed(load(x, row, at_x + j, like), norm, at_norm + j)
        h = charged(current, load(scratch, 0, j, like), p.charge)
        fires = h >= p.threshold
        prefetch(x, row, at_x + PIECE + j, like, False)
        prefetch(spikes, t, at + PIECE + j, like, True)
        store(spikes, t, at + j, where(fires, p.one, p.zero))
        if bits.size > 0:
            store_bits(bits, (t * spikes.shape[1] + at + j) // 8, fires)
        store(scratch, 0, j, where(fires, fired(h, p.reset), h))


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
    there is a norm, and what `of_factor` gives where that is learned. `scratch [T + 2, PIECE]`.
    """
    many, one = lanes_of(p.rest), lane_of(p.rest)
    no_gradient, steps = p.zero, g_spikes.shape[0]
    for piece in range(0, n, PIECE):
        size = min(PIECE, n - piece)
        whole = size - size % count_of(many)
        at_x, at = from_x + piece, low + piece
        begin(many, 0, whole, v_first, at_x, scratch, steps)
        begin(one, whole, size, v_first, at_x, scratch, steps)
        for t in range(steps):
            charge_again(many, 0, whole, t, x, at_x, norm, piece, g_spikes, at, g_x, p, scratch)
            charge_again(one, whole, size, t, x, at_x, norm, piece, g_spikes, at, g_x, p, scratch)
        begin(filled(no_gradient, many), 0, whole, g_v, at_x, scratch, steps + 1)
        begin(filled(no_gradient, one), whole, size, g_v, at_x, scratch, steps + 1)
        for t in range(steps - 1, -1, -1):
            step_back(many, 0, whole, t, x, at_x, norm, piece, v_first, g_spikes, at, g_x, sums, p, scratch)
            step_back(one, whole, size, t, x, at_x, norm, piece, v_first, g_spikes, at, g_x, sums, p, scratch)
        keep(many, 0, whole, scratch, steps + 1, g_v, at_x)
        keep(one, whole, size, scratch, steps + 1, g_v, at_x)


@part
def charge_again(like, first, last, t, x, at_x, norm, at_norm, g_spikes, at, g_x, p, scratch):
    """A forward step in backward, which leaves potentials before firing in row t of `scratch`."""
    row, v = min(t, x.shape[0] - 1), scratch.shape[0] - 2
    for j in range(first, last, count_of(like)):
        current = fed(load(x, row, at_x + j, like), norm, at_norm + j)
        h = charged(current, load(scratch, v, j, like), p.charge)
        store(scratch, t, j, h)
        prefetch(g_spikes, t, at + j, like, False)
        prefetch(g_x, row, at_x + j, like, True)
        store(scratch, v, j, after(h, p))


@part
def step_back(like, first, last, t, x, at_x, norm, at_norm, v_first, g_spikes, at, g_x, sums, p, scratch):
    """From the gradients of spike and potential after the step to those of its input and the potential before it."""
    steps, inputs = g_spikes.shape[0], x.shape[0]
    row, adds = min(t, inputs - 1), inputs < steps and t < steps - 1
    for j in range(first, last, count_of(like)):
        h, g_v = load(scratch, t, j, like), load(scratch, steps + 1, j, like)
        surrogate = surrogate_gradient(h - p.threshold, p.surrogate, p.one)
        direct = of_potential(g_v, h, p.threshold, p.zero, p.reset)
        g_h = multiply_add(of_spike(load(g_spikes, t, at + j, like), g_v, h, p.path), surrogate, direct)
        g = g_h * p.into
        prefetch(x, row, at_x + PIECE + j, like, False)
        store(scratch, steps + 1, j, g_h * p.through)
        add_up(g, x, row, at_x + j, norm, sums, at_norm + j)
        if p.learn:
            before = after(load(scratch, t - 1, j, like), p) if t > 0 else potential(v_first, at_x + j, like)
            store(sums, 2, at_norm + j, load(sums, 2, at_norm + j, like) + of_factor(h, before, g, p.charge))
        if adds:
            g = load(g_x, row, at_x + j, like) + g
        store(g_x, row, at_x + j, g)


@part
def after(h, p):
    """The potential after firing, from that before."""
    return where(h >= p.threshold, fired(h, p.reset), h)


@part
def begin(otherwise, first, last, values, at, scratch, row):
    """Fills a row of scratch with given values, or where there are none with others."""
    for j in range(first, last, count_of(otherwise)):
        store(scratch, row, j, potential(values, at + j, otherwise))


def _is_none(kind):
    return isinstance(kind, types.NoneType)


def fed(x, norm, j):
    """The input of a neuron: normalised by scale and shift, or as it is where there is no norm."""


@scalar(fed)
def _fed(x, norm, j):
    if _is_none(norm):
        return lambda x, norm, j: x
    return lambda x, norm, j: x * load(norm, 0, j, x) + load(norm, 1, j, x)


def potential(values, at, rest):
    """A given potential, or else that at rest."""


@scalar(potential)
def _potential(values, at, rest):
    return (lambda values, at, rest: rest) if _is_none(values) else lambda values, at, rest: load(values, 0, at, rest)


def keep(like, first, last, scratch, row, values, at):
    """Copies a row of scratch to where it is wanted."""


@scalar(keep)
def _keep(like, first, last, scratch, row, values, at):
    def nothing(like, first, last, scratch, row, values, at):
        pass

    def copy(like, first, last, scratch, row, values, at):
        for j in range(first, last, count_of(like)):
            store(values, 0, at + j, load(scratch, row, j, like))

    return nothing if _is_none(values) else copy


def add_up(g, x, t, at, norm, sums, j):
    """Adds to the sums of g and g (x - mean), where there is a norm."""


@scalar(add_up)
def _add_up(g, x, t, at, norm, sums, j):
    def nothing(g, x, t, at, norm, sums, j):
        pass

    def add(g, x, t, at, norm, sums, j):
        store(sums, 0, j, load(sums, 0, j, g) + g)
        store(sums, 1, j, load(sums, 1, j, g) + g * (load(x, t, at, g) - load(norm, 2, j, g)))

    return nothing if _is_none(norm) else add
