"""Rows of neighbouring neurons: a step forward, the same step again in backward, a step back, all steps back.

A row is long, and its loops vectorise.
"""

from __future__ import annotations

from numba import types

from megasnn.kernels.fused.exponential import multiply_add
from megasnn.kernels.fused.neuron import (
    charged,
    fed,
    fired,
    of_factor,
    of_potential,
    of_spike,
    scalar,
    sum_up,
    surrogate_gradient,
)
from megasnn.kernels.jit import part


@part
def fire(x, norm, v, spikes, p):
    """A step forward: spikes, and `v` goes on."""
    threshold, zero, one = p.threshold, p.zero, p.one
    for j in range(spikes.size):
        h = charged(fed(x, norm, j), v[j], p.charge)
        spikes[j] = one if h >= threshold else zero
        v[j] = fired(h, p.reset) if h >= threshold else h


@part
def charge_again(x, norm, v, h, p):
    """The same step in backward: its potentials before firing, and `v` goes on."""
    threshold = p.threshold
    for j in range(h.size):
        potential = charged(fed(x, norm, j), v[j], p.charge)
        h[j] = potential
        v[j] = fired(potential, p.reset) if potential >= threshold else potential


@part
def reset(h, v, p):
    """The potentials after firing, from those before."""
    threshold = p.threshold
    for j in range(h.size):
        v[j] = fired(h[j], p.reset) if h[j] >= threshold else h[j]


@part
def step_back(h, g_spike, g_v, g_x, sums, p):
    """From the gradients of spike and potential after the step to those of its input and the potential before it."""
    threshold, into, through, zero, one = p.threshold, p.into, p.through, p.zero, p.one
    for j in range(h.size):
        surrogate = surrogate_gradient(h[j] - threshold, p.surrogate, one)
        direct = of_potential(g_v[j], h[j], threshold, zero, p.reset)
        g_h = multiply_add(of_spike(g_spike[j], g_v[j], h[j], p.path), surrogate, direct)
        g_x[j] = g_h * into
        g_v[j] = g_h * through
        sum_up(g_h * into, sums, j)


@part
def learn_factor(h, v, g_x, total, p):
    for j in range(h.size):
        total[j] += of_factor(h[j], v[j], g_x[j], p.charge)


@part
def add(a, b):
    for j in range(a.size):
        a[j] += b[j]


def at_step(norm, t, low, n):
    """What `step_back` takes as sums."""


@scalar(at_step)
def _at_step(norm, t, low, n):
    def of_norm(norm, t, low, n):
        x, mean, sum_g, sum_gx = norm
        return x[t, low : low + n], mean[:n], sum_g[:n], sum_gx[:n]

    return (lambda norm, t, low, n: None) if isinstance(norm, types.NoneType) else of_norm


@part
def backward_through_time(h, v_first, g_spikes, low, g_v, g_x, low_x, n, norm, row, v, total, p):
    """All steps of a block in reverse.

    `h [T, >= n]`: potentials before firing. Of `g_spikes [T, M]` and `g_x [T or 1, M]` the `n` columns from `low` and
    `low_x` on are used; a single row of `g_x` receives the sum over the steps. `g_v [n]` holds the gradient of the
    last potential before, that of the first one after. `norm`: `x`, of which the columns of `g_x` are used, `mean,
    sum_g, sum_gx [>= n]`, or None. `row, v [>= n]` are scratch.
    """
    steps = h.shape[0]
    repeated = g_x.shape[0] != steps
    for t in range(steps - 1, -1, -1):
        target = row[:n] if repeated else g_x[t, low_x : low_x + n]
        sums = at_step(norm, 0 if repeated else t, low_x, n)
        step_back(h[t, :n], g_spikes[t, low : low + n], g_v, target, sums, p)
        if p.learn:
            if t > 0:
                reset(h[t - 1, :n], v[:n], p)
                learn_factor(h[t, :n], v[:n], target, total, p)
            else:
                learn_factor(h[t, :n], v_first, target, total, p)
        if repeated and t == steps - 1:
            g_x[0, low_x : low_x + n] = target
        elif repeated:
            add(g_x[0, low_x : low_x + n], target)
