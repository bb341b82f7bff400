"""One time step on lanes: charge, fire, reset, and their gradients.

A number's type selects its formula. So numba compiles a loop without branches for each kind in use.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from megasnn.kernels.neuron_spec import NeuronSpec, numbers
from megasnn.kernels.numba.exponential import exp_negative
from megasnn.kernels.numba.lanes import where


class Integrate(NamedTuple):
    """h = v + x."""

    rest: Any
    factor: Any


class DecayDivided(NamedTuple):
    """h = v + (x - (v - rest)) / factor."""

    rest: Any
    factor: Any


class DecayScaled(NamedTuple):
    """h = v + (x - (v - rest)) * factor."""

    rest: Any
    factor: Any


class LeakDivided(NamedTuple):
    """h = v - (v - rest) / factor + x."""

    rest: Any
    factor: Any


class LeakScaled(NamedTuple):
    """h = v - (v - rest) * factor + x."""

    rest: Any
    factor: Any


class Hard(NamedTuple):
    """After a spike the potential becomes `by`."""

    by: Any


class Soft(NamedTuple):
    """After a spike the potential loses `by`."""

    by: Any


class Detached(NamedTuple):
    """No gradient flows through the spike of the reset."""

    zero: Any


class Attached(NamedTuple):
    """d(v after reset) / d(spike) = jump - slide * h."""

    jump: Any
    slide: Any


class Sigmoid(NamedTuple):
    """Surrogate gradient amplitude * shape(slope * (h - threshold)), shape: a sigmoid's derivative."""

    slope: Any
    amplitude: Any


class ATan(NamedTuple):
    """As `Sigmoid`, shape: an arc tangent's derivative."""

    slope: Any
    amplitude: Any


CHARGES = {
    "CHARGE_ADD": Integrate,
    "CHARGE_DIVIDE": DecayDivided,
    "CHARGE_SCALE": DecayScaled,
    "LEAK_DIVIDE": LeakDivided,
    "LEAK_SCALE": LeakScaled,
}
SURROGATE_TYPES = {"SIGMOID": Sigmoid, "ATAN": ATan}
# numpy's model divides by zero without a branch; Python's would raise.
scalar = partial(overload, jit_options={"error_model": "numpy"})


class Constants(NamedTuple):
    """A neuron in numbers, in the data's type; for fields without a comment see `neuron_spec.Numbers`."""

    charge: Any  # one of CHARGES
    reset: Any  # Hard or Soft
    path: Any  # Detached or Attached
    surrogate: Any  # one of SURROGATE_TYPES
    learn: bool  # the gradient of the charging factor is wanted
    rest: Any
    threshold: Any
    into: Any
    through: Any
    zero: Any
    one: Any


def constants(spec: NeuronSpec, dtype: np.dtype, learned_leak: float, learn: bool) -> Constants:
    """A described neuron's constants. `learned_leak`: the charging factor, if it is learned."""
    number = dtype.type
    n = numbers(spec, learned_leak)
    reset = Hard(number(n.rest)) if n.hard else Soft(number(n.threshold))
    path = Detached(number(0)) if spec.detach_reset else Attached(number(n.jump), number(n.slide))
    return Constants(
        charge=CHARGES[n.charge](number(n.rest), number(n.factor)),
        reset=reset,
        path=path,
        surrogate=SURROGATE_TYPES[n.surrogate](number(n.slope), number(n.amplitude)),
        learn=learn,
        rest=number(n.rest),
        threshold=number(n.threshold),
        into=number(n.into),
        through=number(n.through),
        zero=number(0),
        one=number(1),
    )


def charged(x, v, charge):
    """Potential before firing; v is the potential after the last step."""


@scalar(charged)
def _charged(x, v, charge):
    # Operations stand in the order of torch_backend.py, so that the bits are equal.
    return {
        Integrate: lambda x, v, charge: v + x,
        DecayDivided: lambda x, v, charge: v + (x - (v - charge.rest)) / charge.factor,
        DecayScaled: lambda x, v, charge: v + (x - (v - charge.rest)) * charge.factor,
        LeakDivided: lambda x, v, charge: v - (v - charge.rest) / charge.factor + x,
        LeakScaled: lambda x, v, charge: v - (v - charge.rest) * charge.factor + x,
    }[charge.instance_class]


def fired(h, reset):
    """Potential after a spike."""


@scalar(fired)
def _fired(h, reset):
    return {Hard: lambda h, reset: reset.by, Soft: lambda h, reset: h - reset.by}[reset.instance_class]


def potential_gradient(g_v, h, threshold, zero, reset):
    """Direct part of h's gradient, from the gradient of the potential after firing."""


@scalar(potential_gradient)
def _potential_gradient(g_v, h, threshold, zero, reset):
    # A hard reset sets the potential to a constant, which cuts the direct path at a spike.
    def hard(g_v, h, threshold, zero, reset):
        return where(h >= threshold, zero, g_v)

    return hard if reset.instance_class is Hard else lambda g_v, h, threshold, zero, reset: g_v


def spike_gradient(g_spike, g_v, h, path):
    """A spike's gradient, with the part through the reset."""


@scalar(spike_gradient)
def _spike_gradient(g_spike, g_v, h, path):
    if path.instance_class is Detached:
        return lambda g_spike, g_v, h, path: g_spike
    return lambda g_spike, g_v, h, path: g_spike + g_v * (path.jump - path.slide * h)


def surrogate_gradient(above, surrogate, one):
    """`above` is the potential less the threshold."""


@scalar(surrogate_gradient)
def _surrogate_gradient(above, surrogate, one):
    def sigmoid(above, surrogate, one):
        e = exp_negative(-abs(above * surrogate.slope))
        return surrogate.amplitude * e / ((one + e) * (one + e))

    def atan(above, surrogate, one):
        u = above * surrogate.slope
        return surrogate.amplitude / (one + u * u)

    return {Sigmoid: sigmoid, ATan: atan}[surrogate.instance_class]


def factor_gradient(h, v, g_x, charge):
    """The charging factor's gradient term, for `gradient_of_w`; v is the potential before the step."""


@scalar(factor_gradient)
def _factor_gradient(h, v, g_x, charge):
    # With decaying input h - v = q (x - (v - rest)) and g_x = q g_h; otherwise g_x = g_h.
    if charge.instance_class is DecayScaled:
        return lambda h, v, g_x, charge: g_x * (h - v)
    return lambda h, v, g_x, charge: -(g_x * (v - charge.rest))
