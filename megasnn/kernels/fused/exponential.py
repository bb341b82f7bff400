"""The exponential of a surrogate gradient, written out, because the mathematical library's does not vectorise.

It multiplies and adds with one rounding, which is faster and has the same bits on every processor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic, overload


def _multiply_add(context, a, b, c):
    """a * b + c, rounded once."""

    def generate(context, builder, signature, args):
        return builder.fma(*args)

    return a(a, a, a), generate


def _power_of_two(context, t):
    """2^k from ``t = k + 1.5 * 2^mantissa_bits``: the low bits of such a number hold k, which becomes the exponent."""
    width, exponent_bias, mantissa_bits = (32, 127, 23) if t == types.float32 else (64, 1023, 52)

    def generate(context, builder, signature, args):
        from llvmlite import ir

        integer = ir.IntType(width)
        bits = builder.bitcast(args[0], integer)
        bits = builder.shl(builder.add(bits, integer(exponent_bias)), integer(mantissa_bits))
        return builder.bitcast(bits, args[0].type)

    return t(t), generate


multiply_add: Any = intrinsic(_multiply_add)
power_of_two: Any = intrinsic(_power_of_two)


def exp_negative(x):
    """exp(x) for x <= 0, to about one unit in the last place; below the smallest normal number it stays there.

    x = k ln 2 + r with |r| <= ln 2 / 2, a Taylor polynomial for exp(r), and the exponent set to k.
    """


@overload(exp_negative, inline="always")
def _exp_negative(x):
    double = x == types.float64
    number: Any = np.float64 if double else np.float32
    lowest = number(-708.0 if double else -87.0)
    magic = number(1.5 * 2.0 ** (52 if double else 23))
    # ln 2 in two parts, the first with so few bits that its product with k is exact
    high = number(0.6931471803691238 if double else 0.693359375)
    low = number(1.9082149292705877e-10 if double else -2.1219444005469057e-4)
    per_ln2, one = number(1.0 / math.log(2.0)), number(1.0)
    c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, c13 = (number(1.0 / math.factorial(k)) for k in range(2, 14))

    def implementation(x):
        x = lowest if x < lowest else x  # a NaN stays one
        shifted = multiply_add(x, per_ln2, magic)
        k = shifted - magic
        r = multiply_add(k, -low, multiply_add(k, -high, x))
        p = c7
        if double:
            p = multiply_add(c13, r, c12)
            p = multiply_add(p, r, c11)
            p = multiply_add(p, r, c10)
            p = multiply_add(p, r, c9)
            p = multiply_add(p, r, c8)
            p = multiply_add(p, r, c7)
        p = multiply_add(p, r, c6)
        p = multiply_add(p, r, c5)
        p = multiply_add(p, r, c4)
        p = multiply_add(p, r, c3)
        p = multiply_add(p, r, c2)
        p = multiply_add(p, r, one)
        p = multiply_add(p, r, one)
        return p * power_of_two(shifted)

    return implementation
