"""The loops behind spike_codec.py, which must equal its plain ones.

A unit of work is a run of ``UNIT`` elements, a whole number of packed bytes.
"""

from __future__ import annotations

import numpy as np

from megasnn.kernels.numba.jit import kernel
from megasnn.kernels.numba.jit import run as run

UNIT = 1 << 16


@kernel
def pack_spikes(bits, packed, one, magnitude, strangers, first, last):
    """``bits [M]`` -> ``packed [ceil(M / 8)]``; ``strangers [units]``: whether a unit holds neither 0 nor 1.

    ``bits`` are the values as unsigned integers, so that -0 is no 0; ``one`` is how 1 looks among them, ``magnitude``
    all bits but the sign.
    """
    for unit in range(first, last):
        low, high = unit * UNIT, min((unit + 1) * UNIT, bits.size)
        whole = (high - low) // 8
        strange = False
        piece, out = bits[low:high], packed[low // 8 :]
        for i in range(whole):
            byte = 0
            for k in range(8):
                value = piece[8 * i + k]
                byte |= ((value & magnitude) != 0) << k
                strange |= (value != 0) and (value != one)
            out[i] = byte
        if 8 * whole < high - low:
            byte = 0
            for k in range(high - low - 8 * whole):
                value = piece[8 * whole + k]
                byte |= ((value & magnitude) != 0) << k
                strange |= (value != 0) and (value != one)
            out[whole] = byte
        strangers[unit] = strange


@kernel
def unpack_spikes(values, packed, zero, one, first, last):
    """``packed [ceil(M / 8)]`` -> ``values [M]``."""
    for unit in range(first, last):
        low, high = unit * UNIT, min((unit + 1) * UNIT, values.size)
        whole = (high - low) // 8
        piece, source = values[low:high], packed[low // 8 :]
        for i in range(whole):
            byte = source[i]
            target = piece[8 * i : 8 * i + 8]
            for k in range(8):
                target[k] = one if (byte >> k) & 1 else zero
        for k in range(8 * whole, high - low):
            piece[k] = one if (source[whole] >> (k - 8 * whole)) & 1 else zero


@kernel
def unpack_spike_rows(values, packed, columns, stride, zero, one, first, last):
    """Row r of ``columns`` bits goes to ``values[r * stride :]``; a unit of work is one row."""
    for row in range(first, last):
        target = values[row * stride : row * stride + columns]
        if columns % 8 == 0:
            source = packed[row * columns // 8 : (row + 1) * columns // 8]
            for i in range(source.size):
                byte = source[i]
                eight = target[8 * i : 8 * i + 8]
                for k in range(8):
                    eight[k] = one if (byte >> k) & 1 else zero
        else:
            for c in range(columns):
                bit = row * columns + c
                target[c] = one if (packed[bit >> 3] >> (bit & 7)) & 1 else zero


@kernel
def pack_small(values, bits, packed, strangers, first, last):
    """``values [M]`` -> uint8 ``packed [M]``; ``strangers [units]``: whether a unit holds anything but 0, 1 ... 255.

    ``bits`` are the values as signed integers: that of -0 is negative, and it is none of these.
    """
    for unit in range(first, last):
        low, high = unit * UNIT, min((unit + 1) * UNIT, values.size)
        piece, signed, out = values[low:high], bits[low:high], packed[low:high]
        strange = False
        for i in range(piece.size):
            value = piece[i]
            byte = np.uint8(value if value >= 0 and value <= 255 else 0)  # out of range the conversion is undefined
            out[i] = byte
            strange |= (byte != value) | (signed[i] < 0)
        strangers[unit] = strange
