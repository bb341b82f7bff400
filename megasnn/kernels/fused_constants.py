"""Which neurons and surrogates compiled kernels can compute, and the numbers that make the kernels compute them.

Needs neither torch nor numba nor triton, unlike the kernels themselves, so that a command line is checked without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megasnn.kernels.spec import NEURONS, NeuronSpec
from megasnn.registry import Registry


class FusedCharge(NamedTuple):
    """How the potential before firing follows from input and last potential.

    Attributes:
        code: the name, in `fused.neuron` and `triton.neuron`, of the form that the kernels charge by.
        factor: what it divides or multiplies by.
        leak: the part of the last potential that goes, and of the input that comes where it decays.
    """

    code: str
    factor: float
    leak: float


class FusedSurrogate(NamedTuple):
    """A surrogate gradient `amplitude * shape(slope * (h - threshold))`.

    Attributes:
        code: the name of the shape, there as well.
        amplitude, slope: for an alpha of 1; they grow with it.
    """

    code: str
    amplitude: float
    slope: float


def _no_leak(spec: NeuronSpec, learned: float) -> FusedCharge:
    return FusedCharge("CHARGE_ADD", 1.0, 0.0)


def _leak(spec: NeuronSpec, learned: float) -> FusedCharge:
    leak = 1.0 / spec.tau
    exact = math.frexp(spec.tau)[0] == 0.5  # a power of two: multiplying is the same as dividing, and faster
    code = ("CHARGE_" if spec.decay_input else "LEAK_") + ("SCALE" if exact else "DIVIDE")
    return FusedCharge(code, leak if exact else spec.tau, leak)


def _learned_leak(spec: NeuronSpec, learned: float) -> FusedCharge:
    return FusedCharge("CHARGE_SCALE" if spec.decay_input else "LEAK_SCALE", learned, learned)


# Name of the neuron -> (description, the learned leak) -> how it charges.
FUSED_CHARGES: Registry[Callable[[NeuronSpec, float], FusedCharge]] = Registry(
    "--neuron", {"if": _no_leak, "lif": _leak, "plif": _learned_leak}
)
FUSED_SURROGATES: Registry[FusedSurrogate] = Registry(
    "--surrogate",
    {"sigmoid": FusedSurrogate("SIGMOID", 1.0, 1.0), "atan": FusedSurrogate("ATAN", 0.5, math.pi / 2)},
)


@dataclass(frozen=True)
class Numbers:
    """A neuron in numbers: what the kernels of all backends compute with.

    Attributes:
        charge, surrogate: codes of a FusedCharge and a FusedSurrogate.
        learned: its factor is learned, and perhaps known on the device alone: then factor, into and through are those
            of the factor that was given.
        hard: the reset is.
        factor: what the charge divides or multiplies by.
        kept: d(v after reset) / d(h) where a spike fired, without the path through the spike.
        jump, slide: d(v after reset) / d(spike) = jump - slide * h.
        into, through: d(h) / d(x) and d(h) / d(v).
        slope, amplitude: the surrogate gradient is amplitude * shape(slope * (h - threshold)).
    """

    charge: str
    surrogate: str
    learned: bool
    hard: bool
    rest: float
    threshold: float
    factor: float
    kept: float
    jump: float
    slide: float
    into: float
    through: float
    slope: float
    amplitude: float


@lru_cache(maxsize=256)  # each launch of a kernel asks; a learned leak changes with every step
def numbers(spec: NeuronSpec, learned_leak: float = 0.0) -> Numbers:
    """A neuron in numbers. learned_leak: its factor, where that is learned and known here."""
    charge, surrogate = FUSED_CHARGES[spec.kind](spec, learned_leak), FUSED_SURROGATES[spec.surrogate]
    hard = spec.v_reset is not None
    jump, slide = (spec.rest, 1.0) if hard else (-spec.v_threshold, 0.0)
    if spec.detach_reset:
        jump = slide = 0.0
    return Numbers(
        charge=charge.code,
        surrogate=surrogate.code,
        learned=NEURONS[spec.kind].learns,
        hard=hard,
        rest=spec.rest,
        threshold=spec.v_threshold,
        factor=charge.factor,
        kept=0.0 if hard else 1.0,
        jump=jump,
        slide=slide,
        into=charge.leak if NEURONS[spec.kind].leaks and spec.decay_input else 1.0,
        through=1.0 - charge.leak,
        slope=spec.surrogate_alpha * surrogate.slope,
        amplitude=spec.surrogate_alpha * surrogate.amplitude,
    )
