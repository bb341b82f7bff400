"""The loops of attention without softmax: rows of a small matrix of each frame and head, added up at spikes.

A unit of work is a head of a frame. `bits [frames L, 3 heads d / 8]` are the spikes of q, k and v, channels last. Each
unit has `d` rows of `matrices [units d, d]`, such as its k^T v. A sum stays in registers: columns are cut into blocks,
`cuts [blocks, 2]`, the first column of each and its bytes. sizes: L, heads, d.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megasnn.kernels.numba.jit import kernel, part
from megasnn.kernels.numba.lanes import lanes, load, load_bits, multiply_add, store, where
from megasnn.kernels.numba.spike_lists import WORD, lowest, without_lowest, word

BLOCKS = (128, 64, 32)
"""How many bytes a block may have."""


@part
def spikes_from(bits, pixel, byte, left):
    """Spikes from a byte on, at most 64, where `left` are left of a head's."""
    found = word(bits, pixel, byte)
    return found if left >= WORD else found & ((np.uint64(1) << np.uint64(left)) - np.uint64(1))


@part
def add_at_spikes(added, bits, pixel, byte, d, matrices, top, column):
    """Adds a block of columns to the rows of a matrix where there are spikes."""
    for start in range(0, d, WORD):
        left = spikes_from(bits, pixel, byte + start // 8, d - start)
        while left != 0:
            row = top + start + lowest(left)
            store(matrices, row, column, load(matrices, row, column, added) + added)
            left = without_lowest(left)


@part
def sum_at_spikes(zeros, bits, pixel, byte, d, matrices, top, column):
    """Sum of the rows of a matrix at which there are spikes, a block of columns of it."""
    total = zeros
    for start in range(0, d, WORD):
        left = spikes_from(bits, pixel, byte + start // 8, d - start)
        while left != 0:
            total = total + load(matrices, top + start + lowest(left), column, zeros)
            left = without_lowest(left)
    return total


@part
def count_block(zeros, column, unit, sizes, matrices, bits, one):
    """A block of columns of k^T v of a head, from bits alone."""
    tokens, heads, d = sizes
    frame, head, top = unit // heads, unit % heads, unit * d
    k, v = (heads + head) * d // 8, (2 * heads + head) * d
    for row in range(top, top + d):
        store(matrices, row, column, zeros)
    for pixel in range(frame * tokens, (frame + 1) * tokens):
        added = where(load_bits(bits, pixel, v + column, zeros), one, zeros)
        add_at_spikes(added, bits, pixel, k, d, matrices, top, column)


@part
def apply_block(zeros, column, unit, sizes, out, bits, matrices, scale):
    """A block of columns of the output of a head: q times its matrix."""
    tokens, heads, d = sizes
    frame, head = unit // heads, unit % heads
    for pixel in range(frame * tokens, (frame + 1) * tokens):
        total = sum_at_spikes(zeros, bits, pixel, head * d // 8, d, matrices, unit * d, column)
        store(out, pixel, head * d + column, total * scale)


@part
def gather_block(zeros, column, unit, sizes, matrices, bits, grad, scale):
    """A block of columns of the gradient of k^T v of a head: q^T times the output's gradient."""
    tokens, heads, d = sizes
    frame, head, top = unit // heads, unit % heads, unit * d
    for row in range(top, top + d):
        store(matrices, row, column, zeros)
    for pixel in range(frame * tokens, (frame + 1) * tokens):
        added = load(grad, pixel, head * d + column, zeros) * scale
        add_at_spikes(added, bits, pixel, head * d // 8, d, matrices, top, column)


@part
def turn_block(zeros, column, unit, sizes, out, grad, turned, scale):
    """A block of columns of the gradient of q of a head: the output's gradient times (k^T v)^T."""
    tokens, heads, d = sizes
    frame, q, top = unit // heads, unit % heads * d, unit * d
    end = (frame + 1) * tokens
    for pixel in range(frame * tokens, end, 2):  # two at a time, since each sum waits for itself
        other = min(pixel + 1, end - 1)
        a, b = zeros, zeros
        for j in range(d):
            row = load(turned, top + j, column, zeros)
            a = multiply_add(row, grad[pixel, q + j] * scale, a)
            b = multiply_add(row, grad[other, q + j] * scale, b)
        store(out, pixel, q + column, a)
        store(out, other, q + column, b)


@part
def spread_block(zeros, column, unit, sizes, out, bits, matrices, turned):
    """A block of columns of the gradients of k and v of a head, from the gradient of k^T v."""
    tokens, heads, d = sizes
    frame, top = unit // heads, unit * d
    k, v = (heads + unit % heads) * d, (2 * heads + unit % heads) * d
    for pixel in range(frame * tokens, (frame + 1) * tokens):
        store(out, pixel, k + column, sum_at_spikes(zeros, bits, pixel, v // 8, d, turned, top, column))
        store(out, pixel, v + column, sum_at_spikes(zeros, bits, pixel, k // 8, d, matrices, top, column))


def for_units(work: Any) -> Any:
    """A part that calls `work` for all blocks of some units, with lanes of zeros as wide as a block."""

    @part
    def call(first, last, cuts, zero, sizes, *arguments):
        for unit in range(first, last):
            for i in range(len(cuts)):
                column, size = cuts[i]
                if size == 128:
                    work(lanes(zero, 128), column, unit, sizes, *arguments)
                elif size == 64:
                    work(lanes(zero, 64), column, unit, sizes, *arguments)
                else:
                    work(lanes(zero, 32), column, unit, sizes, *arguments)

    return call


count_units, apply_units, gather_units = for_units(count_block), for_units(apply_block), for_units(gather_block)
turn_units, spread_units = for_units(turn_block), for_units(spread_block)


@kernel
def counts(matrices, bits, cuts, sizes, first, last):
    """Fills `matrices` with k^T v: how often a spike of each channel of k comes with one of each channel of v."""
    zero, one = matrices.dtype.type(0), matrices.dtype.type(1)
    count_units(first, last, cuts, zero, sizes, matrices, bits, one)


@kernel
def applied(out, bits, matrices, cuts, sizes, scale, first, last):
    """q times `matrices`, which are k^T v, times `scale`: to `out [frames L, heads d]`."""
    apply_units(first, last, cuts, out.dtype.type(0), sizes, out, bits, matrices, scale)


@kernel
def gradient_of_counts(matrices, bits, grad, cuts, sizes, scale, first, last):
    """Fills `matrices` with the gradient of k^T v, from that of the output, `grad [frames L, heads d]`."""
    gather_units(first, last, cuts, matrices.dtype.type(0), sizes, matrices, bits, grad, scale)


@kernel
def gradient_of_q(out, grad, turned, cuts, sizes, scale, first, last):
    """To the first third of `out [frames L, 3 heads d]`; `turned` is v^T k."""
    turn_units(first, last, cuts, out.dtype.type(0), sizes, out, grad, turned, scale)


@kernel
def gradients_of_k_and_v(out, bits, matrices, turned, cuts, sizes, first, last):
    """To the other thirds, from the gradient of k^T v, `matrices`, and that of v^T k, `turned`."""
    spread_units(first, last, cuts, out.dtype.type(0), sizes, out, bits, matrices, turned)
