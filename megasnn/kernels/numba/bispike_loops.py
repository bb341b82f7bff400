"""Loops of bi-spiking neurons through all time steps; they must equal `torch_backend`.

Inputs, spikes and their gradients are `[T, M]`, potentials `[1, M]`. Packed arrays are flat, with `ceil(M / 8)` bytes
for each time step. `scales [4, T]`: the amplitude a, a / 2, a / 4 and 1 / a. `first, last` is a range of blocks of
`length` neurons: threads share a call. A block begins at a whole byte.
"""

from __future__ import annotations

from megasnn.kernels.numba.jit import kernel, part
from megasnn.kernels.numba.lanes import (
    count_of,
    filled,
    lane_of,
    lanes_of,
    load,
    load_bits,
    ordered,
    prefetch,
    put_bits,
    store,
    stream,
    where,
)
from megasnn.kernels.numba.time_loop import AHEAD, large


@kernel
def fire_ternary(x, v_first, v_last, spikes, places, inside, scales, one, length, first, last):
    """Spikes and last potentials. `v_first` may be None.

    Packed arrays, if not empty: `places` gets the places of 1, then of -1; `inside` gets the places of |m| <= a.
    """
    size = spikes.shape[1]
    for block in range(first, last):
        low = block * length
        n = min(length, size - low)
        whole = n - n % count_of(lanes_of(one))
        fire_ternary_lanes(lanes_of(one), low, low + whole, x, v_first, v_last, spikes, places, inside, scales, one)
        fire_ternary_lanes(lane_of(one), low + whole, low + n, x, v_first, v_last, spikes, places, inside, scales, one)
    # Streamed stores have no order of their own, and another thread may read the spikes next.
    ordered()


@part
def fire_ternary_lanes(like, first, last, x, v_first, v_last, spikes, places, inside, scales, one):
    steps = spikes.shape[0]
    row = (spikes.shape[1] + 7) // 8
    past = large(spikes)
    zero = one - one
    for j in range(first, last, count_of(like)):
        v = filled(zero, like)
        if v_first is not None:
            v = load(v_first, 0, j, like)
        for t in range(steps):
            prefetch(x, t, j + AHEAD, like)
            m = v + load(x, t, j, like)
            above = scales[1, t] < m
            below = m < -scales[1, t]
            stream(spikes, t, j, where(above, one, where(below, -one, zero)), past)
            if inside.size > 0:
                put_bits(places, t * row, j, above)
                put_bits(places, (steps + t) * row, j, below)
                put_bits(inside, t * row, j, scales[0, t] >= abs(m))
            v = m * where(above, zero, where(below, scales[1, t], scales[2, t]))
        store(v_last, 0, j, v)


@kernel
def back_ternary(g_spikes, g_last, g_x, places, inside, scales, one, length, first, last):
    """Input gradient; its first time step is the first potential's. `g_last` may be None."""
    size = g_spikes.shape[1]
    for block in range(first, last):
        low = block * length
        n = min(length, size - low)
        whole = n - n % count_of(lanes_of(one))
        back_ternary_lanes(lanes_of(one), low, low + whole, g_spikes, g_last, g_x, places, inside, scales, one)
        back_ternary_lanes(lane_of(one), low + whole, low + n, g_spikes, g_last, g_x, places, inside, scales, one)
    ordered()


@part
def back_ternary_lanes(like, first, last, g_spikes, g_last, g_x, places, inside, scales, one):
    steps = g_spikes.shape[0]
    row = (g_spikes.shape[1] + 7) // 8
    past = large(g_x)
    zero = one - one
    for j in range(first, last, count_of(like)):
        g_potential = filled(zero, like)
        if g_last is not None:
            g_potential = load(g_last, 0, j, like)
        for t in range(steps - 1, -1, -1):
            prefetch(g_spikes, t, j + AHEAD, like)
            above = load_bits(places, t * row, j, like)
            below = load_bits(places, (steps + t) * row, j, like)
            within = load_bits(inside, t * row, j, like)
            g_spike = where(within, load(g_spikes, t, j, like) * scales[3, t], zero)
            g_potential = g_spike + g_potential * where(above, zero, where(below, scales[1, t], scales[2, t]))
            stream(g_x, t, j, g_potential, past)
