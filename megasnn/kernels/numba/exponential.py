"""The exponential of lanes, for surrogate gradients.

The mathematical library's takes one number at a time. This one multiplies and adds with one rounding, which is faster
and gives the same bits on every processor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from megasnn.kernels.numba.lanes import constant_lanes, multiply_add, of_lanes, where


def _power_of_two(context, t):
    """2^k from ``t = k + 1.5 * 2^mantissa_bits``: the low bits of such a number hold k, which becomes the exponent."""
    width, exponent_bias, mantissa_bits = 64, 1023, 52
    if t.element == types.float32:
        width, exponent_bias, mantissa_bits = 32, 127, 23

    def generate(context, builder, signature, args):
        integers = ir.VectorType(ir.IntType(width), t.count)
        bits = builder.add(builder.bitcast(args[0], integers), constant_lanes(integers, exponent_bias))
        return builder.bitcast(builder.shl(bits, constant_lanes(integers, mantissa_bits)), args[0].type)

    return t(t), generate


def _exponential_series(context, r):
    """The Taylor polynomial of exp(r), to the precision of its type for |r| <= ln 2 / 2."""
    is_single = r.element == types.float32
    degree = 7 if is_single else 13
    number: Any = np.float32 if is_single else np.float64

    def generate(context, builder, signature, args):
        vector = args[0].type
        result = constant_lanes(vector, float(number(1.0 / math.factorial(degree))))
        for k in range(degree - 1, -1, -1):
            term = constant_lanes(vector, float(number(1.0 / math.factorial(k))))
            result = of_lanes(builder, "llvm.fma", result, args[0], term)
        return result

    return r(r), generate


power_of_two: Any = intrinsic(_power_of_two)
exponential_series: Any = intrinsic(_exponential_series)


def exp_negative(x):
    """exp(x) for x <= 0 to about one unit in the last place, but never below the smallest normal number.

    x = k ln 2 + r with |r| <= ln 2 / 2: a Taylor polynomial gives exp(r), and k becomes the exponent.
    """


@overload(exp_negative, inline="always")
def _exp_negative(x):
    double = x.element == types.float64
    number: Any = np.float64 if double else np.float32
    lowest = number(-708.0 if double else -87.0)
    magic = number(1.5 * 2.0 ** (52 if double else 23))
    # ln 2 in two parts. The first has so few bits that its product with k is exact.
    high = number(0.6931471803691238 if double else 0.693359375)
    low = number(1.9082149292705877e-10 if double else -2.1219444005469057e-4)
    per_ln2 = number(1.0 / math.log(2.0))

    def implementation(x):
        x = where(x < lowest, lowest, x)  # a NaN stays one
        shifted = multiply_add(x, per_ln2, magic)
        k = shifted - magic
        r = multiply_add(k, -low, multiply_add(k, -high, x))
        return exponential_series(r) * power_of_two(shifted)

    return implementation
