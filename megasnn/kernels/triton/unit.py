"""Normalise, charge and fire, and the gradient of the input: a pass over memory each.

`x [X, in_size]` with X = T, or 1 for an input that is repeated; `size` is the number of neurons, and `[T, size]` are
their spikes. Without `norm` a kernel computes the neurons alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megasnn.kernels.triton.launch import operator
from megasnn.kernels.triton.neuron import charge, charging_factor, factor_backward, fires, reset, step_backward
from megasnn.kernels.triton.pool import pooled
from megasnn.kernels.triton.steps import (
    at_step,
    chunk_starts,
    fed,
    first_potential,
    norm_backward,
    of_channel,
    recomputed,
)


@operator("x norm v_first q", "spikes bits v_last")
@triton.jit
def fire_kernel(x, norm, v_first, q, spikes, bits, v_last, size, in_size, channels, height, width, above,
                T: tl.constexpr, REPEATED: tl.constexpr, POOL: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
                AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """`bits [T, size / 8]`: the spikes once more, packed as `megasnn.kernels.codec` does it, or None.

    AT_ONCE: how many steps, a divisor of T, are written out one after the other; all where the input is repeated.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    byte = tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    q = charging_factor(q, N, D)
    v = first_potential(v_first, place, inside, N, D)
    scale, shift = None, None
    if norm is not None:
        scale, shift = of_channel(norm, 0, place, inside, channels), of_channel(norm, 1, place, inside, channels)
    for _ in range(T // AT_ONCE):
        for t in tl.static_range(AT_ONCE):
            if t == 0 or not REPEATED:
                if POOL:
                    y, _, _ = pooled(x, place, inside, scale, shift, channels, height, width, above, D)
                else:
                    y = fed(x, place, inside, scale, shift, D)
                x += in_size
            h = charge(y, v, q, N)
            fired = fires(h, N)
            tl.store(spikes + place, fired.to(D).to(spikes.dtype.element_ty), mask=inside)
            spikes += size
            if bits is not None:
                eight = tl.reshape((fired & inside).to(tl.int32), [BLOCK // 8, 8]) << tl.arange(0, 8)[None, :]
                tl.store(bits + byte, tl.sum(eight, axis=1).to(tl.uint8), mask=byte < size // 8)
                bits += size // 8
            v = reset(h, N)
    if v_last is not None:
        tl.store(v_last + place, v, mask=inside)


@operator("x g_spikes norm v_first g_last q", "g_x g_first totals")
@triton.jit
def gradient_kernel(x, g_spikes, g_x, norm, v_first, g_last, g_first, q, totals, size, channels,
                    T: tl.constexpr, CHUNK: tl.constexpr, REPEATED: tl.constexpr, BATCH: tl.constexpr,
                    N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The gradient of the input, through the norm or of the neurons alone, without pooling.

    Args:
        norm: rows for each channel; the fourth and fifth are what `norm_backward` subtracts.
        g_last, g_first: gradients of the potentials after and before all steps, or None.
        totals: what each program's learned factor adds up, or None.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    q = charging_factor(q, N, D)
    first = first_potential(v_first, place, inside, N, D)
    scale, shift, mean, mean_g, mean_gx = None, None, None, None, None
    if norm is not None:
        scale, shift = of_channel(norm, 0, place, inside, channels), of_channel(norm, 1, place, inside, channels)
    starts = chunk_starts(x, place, inside, scale, shift, first, q, size, T, CHUNK, REPEATED, N, D)
    if BATCH:
        mean = of_channel(norm, 2, place, inside, channels)
        mean_g, mean_gx = of_channel(norm, 3, place, inside, channels), of_channel(norm, 4, place, inside, channels)
    g_v = tl.zeros(place.shape, D)
    if g_last is not None:
        g_v = tl.load(g_last + place, mask=inside, other=0).to(D)
    summed = tl.zeros(place.shape, D)
    total = tl.zeros(place.shape, D)
    for c in tl.static_range((T - 1) // CHUNK, -1, -1):
        h = recomputed(x, place, inside, scale, shift, starts[c], q, size, c * CHUNK,
                       T if T < c * CHUNK + CHUNK else c * CHUNK + CHUNK, REPEATED, N, D)  # fmt: skip
        for i in tl.static_range(CHUNK - 1, -1, -1):
            if c * CHUNK + i < T:
                g_spike = tl.load(at_step(g_spikes, c * CHUNK + i, size, False) + place, mask=inside, other=0)
                g, g_v = step_backward(h[i], g_spike.to(D), g_v, q, N)
                if totals is not None:
                    before = reset(h[i - 1], N) if i > 0 else starts[c]
                    total += factor_backward(h[i], before, g, N)
                if REPEATED:
                    summed += g
                if c + i == 0 or not REPEATED:
                    g = summed if REPEATED else g
                    if norm is not None:
                        value = tl.load(at_step(x, c * CHUNK + i, size, REPEATED) + place, mask=inside, other=0)
                        g = norm_backward(g, value.to(D), scale, mean, mean_g, mean_gx)
                    target = at_step(g_x, c * CHUNK + i, size, REPEATED) + place
                    tl.store(target, g.to(g_x.dtype.element_ty), mask=inside)
    if g_first is not None:
        tl.store(g_first + place, g_v, mask=inside)
    if totals is not None:
        tl.store(totals + tl.program_id(0), tl.sum(total.to(tl.float64), axis=0))
