"""Which neurons and surrogates the fused kernels can compute, and the numbers that make the kernels compute them.

Needs neither torch nor numba, unlike the kernels themselves, so that a command line is checked without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from megasnn.kernels.spec import NeuronSpec
from megasnn.table import Table


class FusedCharge(NamedTuple):
    """How the potential before firing follows from input and last potential.

    Attributes:
        code: the name in `compiled` of the form that the kernels charge by.
        factor: what it divides or multiplies by.
        leak: the part of the last potential that goes, and of the input that comes where it decays.
    """

    code: str
    factor: float
    leak: float


class FusedSurrogate(NamedTuple):
    """A surrogate gradient `amplitude * shape(slope * (h - threshold))`.

    Attributes:
        code: the name of the shape in `compiled`.
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
FUSED_CHARGES: Table[Callable[[NeuronSpec, float], FusedCharge]] = Table(
    "--neuron", {"if": _no_leak, "lif": _leak, "plif": _learned_leak}
)
FUSED_SURROGATES: Table[FusedSurrogate] = Table(
    "--surrogate",
    {"sigmoid": FusedSurrogate("SIGMOID", 1.0, 1.0), "atan": FusedSurrogate("ATAN", 0.5, math.pi / 2)},
)
