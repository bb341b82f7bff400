"""Batch norm's coefficients, in double precision, and their repetition to the length of a loop.

`coefficients [4, C]`: scale, shift, mean, and 1 / deviation.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from megasnn.kernels.numba.jit import kernel, part

# A layer of a small model has a few thousand values a channel. There these sums over channels, one numpy function after
# another, took as long as the loops over all values.


@kernel
def norm_coefficients(mean, variance, weight, bias, eps, coefficients):
    for c in range(mean.size):
        inverse = 1.0 / np.sqrt(variance[c] + eps)
        scale = inverse * weight[c]
        coefficients[0, c] = scale
        coefficients[1, c] = bias[c] - mean[c] * scale
        coefficients[2, c] = mean[c]
        coefficients[3, c] = inverse


@kernel
def fold_slices(slices, coefficients, total, g_weight, g_bias):
    """Sums a backward's `slices [n, 3, C]` to `total [3, C]`, with the norm's parameter gradients `[C]`."""
    # From the first slice to the last: slices depend only on sizes, and so the order does on no number of threads.
    total[:] = slices[0]
    for index in range(1, len(slices)):
        for k in range(3):
            for c in range(total.shape[1]):
                total[k, c] += slices[index, k, c]
    for c in range(total.shape[1]):
        g_weight[c] = total[1, c] * coefficients[3, c]
        g_bias[c] = total[0, c]


def repeated(coefficients, rows, length, like):
    """First `rows` of `coefficients [any, C]`, repeated to `length` in the type of `like`; None for None."""


@overload(repeated)
def _repeated(coefficients, rows, length, like):
    def wide_rows(coefficients, rows, length, like):
        channels = coefficients.shape[1]
        wide = np.empty((rows, length), like.dtype)
        for k in range(rows):
            for c in range(channels):
                wide[k, c] = coefficients[k, c]
            for start in range(channels, length, channels):
                for c in range(channels):
                    wide[k, start + c] = wide[k, c]
        return wide

    without_norm = isinstance(coefficients, types.NoneType)
    return (lambda coefficients, rows, length, like: None) if without_norm else wide_rows


@part
def input_gradient_coefficients(coefficients, sums, count):
    """`[4, C]`: scale, mean, mean gradient, mean gradient per deviation of the input; `sums [3, C]`."""
    found = np.empty(coefficients.shape)
    for c in range(coefficients.shape[1]):
        inverse = coefficients[3, c]
        found[0, c] = coefficients[0, c]
        found[1, c] = coefficients[2, c]
        found[2, c] = sums[0, c] / count
        found[3, c] = sums[1, c] * (inverse * inverse) / count
    return found
