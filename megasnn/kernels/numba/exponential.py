"""Exponential on lanes, for surrogate gradients; the mathematical library takes one number at a time.

Fused multiply-adds are faster, and give the same bits on every processor.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from megasnn.kernels.numba.lanes import call_intrinsic, constant_lanes, multiply_add, where


class _Format(NamedTuple):
    """A floating-point type and its constants."""

    number: Any
    exponent_bias: int
    mantissa_bits: int
    degree: int  # of a Taylor polynomial for exp(r) that is exact enough for |r| <= ln 2 / 2
    lowest: float  # its exp is still a normal number
    # ln 2 in two parts. The first has so few bits that its product with k is exact.
    ln2_high: float
    ln2_low: float


_FORMATS = {
    types.float32: _Format(np.float32, 127, 23, 7, -87.0, 0.693359375, -2.1219444005469057e-4),
    types.float64: _Format(np.float64, 1023, 52, 13, -708.0, 0.6931471803691238, 1.9082149292705877e-10),
}


def _power_of_two(context, t):
    """2^k from ``t = k + 1.5 * 2^mantissa_bits``, whose low bits hold k: k becomes the exponent."""
    c = _FORMATS[t.element]

    def generate(context, builder, signature, args):
        integers = ir.VectorType(ir.IntType(t.element.bitwidth), t.count)
        bits = builder.add(builder.bitcast(args[0], integers), constant_lanes(integers, c.exponent_bias))
        return builder.bitcast(builder.shl(bits, constant_lanes(integers, c.mantissa_bits)), args[0].type)

    return t(t), generate


def _exponential_series(context, r):
    """Taylor polynomial for exp(r), to its type's precision for |r| <= ln 2 / 2."""
    c = _FORMATS[r.element]

    def generate(context, builder, signature, args):
        vector = args[0].type
        result = constant_lanes(vector, float(c.number(1.0 / math.factorial(c.degree))))
        # Horner's scheme: a term takes one multiply-add, rounded once.
        for k in range(c.degree - 1, -1, -1):
            term = constant_lanes(vector, float(c.number(1.0 / math.factorial(k))))
            result = call_intrinsic(builder, "llvm.fma", result, args[0], term)
        return result

    return r(r), generate


power_of_two: Any = intrinsic(_power_of_two)
exponential_series: Any = intrinsic(_exponential_series)


def exp_negative(x):
    """exp(x) for x <= 0, to about one unit in the last place; never below the smallest normal number.

    x = k ln 2 + r with |r| <= ln 2 / 2: a Taylor polynomial gives exp(r), and k becomes the exponent.
    """


@overload(exp_negative, inline="always")
def _exp_negative(x):
    c = _FORMATS[x.element]
    number = c.number
    lowest = number(c.lowest)
    magic = number(1.5 * 2.0**c.mantissa_bits)
    high = number(c.ln2_high)
    low = number(c.ln2_low)
    per_ln2 = number(1.0 / math.log(2.0))

    def implementation(x):
        # A NaN stays one, since its comparison is false.
        x = where(x < lowest, lowest, x)
        shifted = multiply_add(x, per_ln2, magic)
        k = shifted - magic
        r = multiply_add(k, -low, multiply_add(k, -high, x))
        return exponential_series(r) * power_of_two(shifted)

    return implementation
