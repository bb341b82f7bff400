"""One time step of a neuron, forward and backward, and the steps that a backward computes again.

Operations stand in the order of `torch_backend.py`, in q's type. A block is a tensor, in any shape, with places
in one time step of the output, `[N, ..., C]` in memory.

`N` is a `megasnn.kernels.neuron_spec.Numbers`, constant in a compiled kernel. `q` divides or multiplies the charge and
may be learned. `norm` points to the coefficients, rows with C numbers: scale, shift and mean. `mean_gradients` points
to the two rows that `norm_backward` subtracts; it is None for fixed statistics.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
FUSES: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)
"""Triton's interpreter rounds a product before it adds."""


@triton.jit
def charging_factor(q, N: tl.constexpr, D: tl.constexpr):
    """The charge's factor in type D: learned and in memory, or a constant."""
    if q is None:
        factor = tl.full((), N.factor, D)
    else:
        factor = tl.load(q).to(D)
    return factor


@triton.jit
def divided(x, y):
    """x / y for one y and many x, rounded correctly, and infinite where x is."""
    # With the machine's correct division a backward took three times as long (H200). So the product with the inverse is
    # corrected twice by its remainder, which a fused operation gives without rounding. The second result is exact
    # (Markstein, IBM Journal of Research and Development 34(1), 1990), except for quotients below 1e-30 in float32.
    if FUSES:
        inverse = _divided(tl.full((), 1.0, y.dtype), y)
        first = x * inverse
        z = tl.fma(tl.fma(-first, y, x), inverse, first)
        z = tl.fma(tl.fma(-z, y, x), inverse, z)
        # Infinite x: the corrections are NaN.
        z = tl.where(z == z, z, first)
    else:
        z = _divided(x, y)
    return z


@triton.jit
def _divided(x, y):
    return tl.math.div_rn(x, y) if x.dtype == tl.float32 else x / y


@triton.jit
def charge(y, v, q, N: tl.constexpr):
    rest = tl.full((), N.rest, q.dtype)
    if N.charge == "CHARGE_ADD":
        h = v + y
    elif N.charge == "CHARGE_DIVIDE":
        h = v + divided(y - (v - rest), q)
    elif N.charge == "CHARGE_SCALE":
        h = v + (y - (v - rest)) * q
    elif N.charge == "LEAK_DIVIDE":
        h = v - divided(v - rest, q) + y
    else:
        tl.static_assert(N.charge == "LEAK_SCALE")
        h = v - (v - rest) * q + y
    return h


@triton.jit
def fires(h, N: tl.constexpr):
    return h >= tl.full((), N.threshold, h.dtype)


@triton.jit
def reset(h, N: tl.constexpr):
    if N.hard:
        v = tl.where(fires(h, N), tl.full((), N.rest, h.dtype), h)
    else:
        v = tl.where(fires(h, N), h - tl.full((), N.threshold, h.dtype), h)
    return v


@triton.jit
def surrogate(h, N: tl.constexpr):
    one = tl.full((), 1.0, h.dtype)
    amplitude = tl.full((), N.amplitude, h.dtype)
    above = h - tl.full((), N.threshold, h.dtype)
    if N.surrogate == "SIGMOID":
        e = tl.exp2(tl.abs(above) * tl.full((), -LOG2_E * N.slope, h.dtype))
        s = amplitude * e / ((one + e) * (one + e))
    else:
        tl.static_assert(N.surrogate == "ATAN")
        u = above * tl.full((), N.slope, h.dtype)
        s = amplitude / (one + u * u)
    return s


@triton.jit
def step_backward(h, g_spike, g_v, q, N: tl.constexpr):
    """Gradients for the step's input and the potential before it, from the spike's and the potential's."""
    one = tl.full((), 1.0, h.dtype)
    if N.jump != 0 or N.slide != 0:  # the reset is not detached
        g_spike += g_v * (tl.full((), N.jump, h.dtype) - tl.full((), N.slide, h.dtype) * h)
    direct = tl.where(fires(h, N), tl.full((), 0.0, h.dtype), g_v) if N.hard else g_v
    g_h = g_spike * surrogate(h, N) + direct
    if N.learned:
        g_x = g_h * q if N.charge == "CHARGE_SCALE" else g_h
        g_v = g_h * (one - q)
    else:
        g_x = g_h * tl.full((), N.into, h.dtype)
        g_v = g_h * tl.full((), N.through, h.dtype)
    return g_x, g_v


@triton.jit
def factor_gradient(h, v, g_x, N: tl.constexpr):
    """A learned factor's gradient term, for `gradient_of_w`; v is the potential before the step."""
    # With decaying input h - v = q (x - (v - rest)) and g_x = q g_h; otherwise g_x = g_h.
    if N.charge == "CHARGE_SCALE":
        part = g_x * (h - v)
    else:
        part = -g_x * (v - tl.full((), N.rest, h.dtype))
    return part


@triton.jit
def channel_values(norm, row: tl.constexpr, place, inside, channels):
    """For each place, its channel's number in a row of `norm`."""
    # Kernels call this once before all time steps: between stores the compiler would load the numbers again.
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
    """The neurons' input in one time step: normalised, or x itself without `scale`."""
    y = tl.load(x + place, mask=inside, other=0).to(D)
    if scale is not None:
        y = y * scale + shift
    return y


@triton.jit
def appended(row, x):
    return row + (x,)  # in a function, because type checkers give a variable the length of its first tuple


@triton.jit
def at_step(x, t: tl.constexpr, size, REPEATED: tl.constexpr):
    """Pointer to x's time step t; a repeated x has only one."""
    if not REPEATED:
        x += tl.full((), t, tl.int64) * size
    return x


@triton.jit
def recomputed(x, place, inside, scale, shift, v, q, size, BEGIN: tl.constexpr, END: tl.constexpr,
               REPEATED: tl.constexpr, N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Tuple of potentials before firing, for steps BEGIN to END - 1; v: the potential before them."""
    h = ()
    for t in tl.static_range(BEGIN, END):
        if t == BEGIN or not REPEATED:
            y = fed(at_step(x, t, size, REPEATED), place, inside, scale, shift, D)
        h_t = charge(y, v, q, N)
        v = reset(h_t, N)
        h = appended(h, h_t)
    return h


@triton.jit
def keep_chunk_starts(x, place, inside, scale, shift, v, q, size, kept, T: tl.constexpr, CHUNK: tl.constexpr,
                      REPEATED: tl.constexpr, N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Returns the potential before the last chunk; stores the others' in `kept [(T - 1) // CHUNK, size]`."""
    for _ in range((T - 1) // CHUNK):
        tl.store(kept + place, v, mask=inside)
        for t in tl.static_range(CHUNK):
            if t == 0 or not REPEATED:
                y = fed(at_step(x, t, size, REPEATED), place, inside, scale, shift, D)
            v = reset(charge(y, v, q, N), N)
        x = at_step(x, CHUNK, size, REPEATED)
        kept += size
    # Another thread may read what one has written.
    tl.debug_barrier()
    return v


@triton.jit
def norm_backward(g, value, scale, mean, mean_g, mean_gx):
    """The norm's input gradient from its output gradient; without `mean` for fixed statistics."""
    if mean is not None:
        g = g - mean_g - (value - mean) * mean_gx
    return scale * g
