"""Kernels that normalise, charge and fire, or give the input gradient, in one pass over memory each.

They must equal torch_backend.py's `fire` and `input_gradient`. `x [X, in_size]` with X = T, or 1 for a repeated input;
`size` neurons fire spikes `[T, size]`. Without `norm` they compute the neurons alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megasnn.kernels.triton.pool import pooled
from megasnn.kernels.triton.step import (
    at_step,
    channel_values,
    charge,
    charging_factor,
    factor_gradient,
    fed,
    fires,
    first_potential,
    keep_chunk_starts,
    norm_backward,
    recomputed,
    reset,
    step_backward,
)


@triton.jit
def fire_kernel(x, norm, v_first, q, spikes, bits, v_last, size, in_size, channels, height, width, above,
                T: tl.constexpr, REPEATED: tl.constexpr, POOL: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
                AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Spikes, and perhaps their bits and the last potential.

    Args:
        bits: `[T, size / 8]`, the spikes packed as in `megasnn.kernels.spike_codec`, or None.
        AT_ONCE: unrolled steps, a divisor of T.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    byte = tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    q = charging_factor(q, N, D)
    v = first_potential(v_first, place, inside, N, D)
    scale, shift = None, None
    if norm is not None:
        scale = channel_values(norm, 0, place, inside, channels)
        shift = channel_values(norm, 1, place, inside, channels)
    for _ in range(T // AT_ONCE):
        for t in tl.static_range(AT_ONCE):
            if t == 0 or not REPEATED:
                # A repeated input is read once for several steps.
                if POOL:
                    y, _, _ = pooled(x, place, inside, scale, shift, channels, height, width, above, D)
                else:
                    y = fed(x, place, inside, scale, shift, D)
                if not REPEATED:
                    x += in_size
            h = charge(y, v, q, N)
            fired = fires(h, N)
            tl.store(spikes + place, fired.to(D).to(spikes.dtype.element_ty), mask=inside)
            spikes += size
            if bits is not None:
                # Neurons outside would set bits of the last byte.
                eight = tl.reshape((fired & inside).to(tl.int32), [BLOCK // 8, 8]) << tl.arange(0, 8)[None, :]
                tl.store(bits + byte, tl.sum(eight, axis=1).to(tl.uint8), mask=byte < size // 8)
                bits += size // 8
            v = reset(h, N)
    if v_last is not None:
        tl.store(v_last + place, v, mask=inside)


@triton.jit
def gradient_of_chunk(x, g_spikes, g_x, place, inside, scale, shift, mean, mean_g, mean_gx, start, g_v, summed, total,
                      q, size, STEPS: tl.constexpr, REPEATED: tl.constexpr, LEARN: tl.constexpr, N: tl.constexpr,
                      D: tl.constexpr):  # fmt: skip
    """Writes the gradients for the STEPS time steps at which x, g_spikes and g_x point.

    Returns the potential's gradient before them, and two sums over the steps so far: with REPEATED the gradients, with
    LEARN the learned factor's terms.
    """
    h = recomputed(x, place, inside, scale, shift, start, q, size, 0, STEPS, REPEATED, N, D)
    for i in tl.static_range(STEPS - 1, -1, -1):
        g_spike = tl.load(at_step(g_spikes, i, size, False) + place, mask=inside, other=0)
        g, g_v = step_backward(h[i], g_spike.to(D), g_v, q, N)
        if LEARN:
            before = reset(h[i - 1], N) if i > 0 else start
            total += factor_gradient(h[i], before, g, N)
        if REPEATED:
            summed += g
        else:
            store_gradient(at_step(x, i, size, False), at_step(g_x, i, size, False), g, place, inside, scale, mean,
                           mean_g, mean_gx, D)  # fmt: skip
    return g_v, summed, total


@triton.jit
def store_gradient(x, g_x, g, place, inside, scale, mean, mean_g, mean_gx, D: tl.constexpr):
    """Stores one time step's input gradient, through the norm if there is one."""
    if scale is not None:
        value = tl.load(x + place, mask=inside, other=0)
        g = norm_backward(g, value.to(D), scale, mean, mean_g, mean_gx)
    tl.store(g_x + place, g.to(g_x.dtype.element_ty), mask=inside)


@triton.jit
def gradient_kernel(x, g_spikes, g_x, norm, mean_gradients, v_first, g_last, g_first, q, totals, kept, size, channels,
                    T: tl.constexpr, CHUNK: tl.constexpr, REPEATED: tl.constexpr,
                    N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Input gradient without pooling, through the norm or the neurons alone.

    Args:
        g_last, g_first: gradients for the potentials after and before all steps, or None.
        totals: each program's sum over the learned factor's terms, or None.
        kept: memory for `keep_chunk_starts`; None for a single chunk.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    q = charging_factor(q, N, D)
    first = first_potential(v_first, place, inside, N, D)
    scale, shift = None, None
    mean, mean_g, mean_gx = None, None, None
    if norm is not None:
        scale = channel_values(norm, 0, place, inside, channels)
        shift = channel_values(norm, 1, place, inside, channels)
    last = first
    if kept is not None:
        last = keep_chunk_starts(x, place, inside, scale, shift, first, q, size, kept, T, CHUNK, REPEATED, N, D)
    if mean_gradients is not None:
        mean = channel_values(norm, 2, place, inside, channels)
        mean_g = channel_values(mean_gradients, 0, place, inside, channels)
        mean_gx = channel_values(mean_gradients, 1, place, inside, channels)
    g_v = tl.zeros(place.shape, D)
    if g_last is not None:
        g_v = tl.load(g_last + place, mask=inside, other=0).to(D)
    summed = tl.zeros(place.shape, D)
    total = tl.zeros(place.shape, D)
    # A constant: without a learned factor its terms are not compiled.
    LEARN: tl.constexpr = totals is not None
    # The last chunk comes first: it may be shorter than the others.
    BEFORE: tl.constexpr = (T - 1) // CHUNK  # chunks before the last one
    x_c = at_step(x, BEFORE * CHUNK, size, REPEATED)
    g_c = at_step(g_spikes, BEFORE * CHUNK, size, False)
    out_c = at_step(g_x, BEFORE * CHUNK, size, REPEATED)
    g_v, summed, total = gradient_of_chunk(
        x_c, g_c, out_c, place, inside, scale, shift, mean, mean_g, mean_gx, last, g_v, summed, total, q, size,
        T - BEFORE * CHUNK, REPEATED, LEARN, N, D,
    )  # fmt: skip
    if kept is not None:
        kept_c = at_step(kept, BEFORE, size, False)
        for _ in range(BEFORE):
            x_c = at_step(x_c, -CHUNK, size, REPEATED)
            g_c = at_step(g_c, -CHUNK, size, False)
            out_c = at_step(out_c, -CHUNK, size, REPEATED)
            kept_c = at_step(kept_c, -1, size, False)
            g_v, summed, total = gradient_of_chunk(
                x_c, g_c, out_c, place, inside, scale, shift, mean, mean_g, mean_gx,
                tl.load(kept_c + place, mask=inside, other=0), g_v, summed, total, q, size,
                CHUNK, REPEATED, LEARN, N, D,
            )  # fmt: skip
    if REPEATED:
        store_gradient(x, g_x, summed, place, inside, scale, mean, mean_g, mean_gx, D)
    if g_first is not None:
        tl.store(g_first + place, g_v, mask=inside)
    if totals is not None:
        tl.store(totals + tl.program_id(0), tl.sum(total.to(tl.float64), axis=0))
