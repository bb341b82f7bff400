"""Lists of the places of spikes, from the bits that `megasnn.kernels.spike_codec` packs.

`words [pixels, C / 64]`, rounded up, are those of an input with its channels last; `x [pixels, C]` are its values, or
an array without elements, where all that are not 0 are 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.cpython.unsafe import numbers

from megasnn.kernels.numba.jit import part

_trailing_zeros: Any = numbers.trailing_zeros
WORD = 64
"""Bits that are looked through at once."""


@part
def lowest(word):
    """Place of the lowest bit of a word that is not 0."""
    return np.intp(_trailing_zeros(word))


@part
def without_lowest(word):
    return word & (word - np.uint64(1))


@part
def by_pixel(words, x, first, last, starts, channels, values):
    """Lists for pixels `first` to `last` the channels that are not 0, in their order, and their values.

    Those of the w-th 64 channels of the i-th pixel lie from `starts[i * words + w]` to the next start.
    """
    count, entry = 0, 0
    for pixel in range(first, last):
        for i in range(words.shape[1]):
            starts[entry] = count
            entry += 1
            left = words[pixel, i]
            while left != 0:
                channel = WORD * i + lowest(left)
                channels[count] = channel
                values[count] = x[pixel, channel] if x.size > 0 else 1
                count += 1
                left = without_lowest(left)
    starts[entry] = count


@part
def by_channel(words, x, first, last, width, stride, ends, places, values):
    """Lists for each channel the pixels from `first` to `last` where it is not 0, in their order, and their values.

    Those of a channel lie from the end of the one before to `ends[channel]`, which while they are filled in is how far
    that has come. Pixels are counted from `first` on, in lines of `width` that begin `stride` places apart.
    """
    ends[:] = 0
    for pixel in range(first, last):
        for i in range(words.shape[1]):
            left = words[pixel, i]
            while left != 0:
                ends[WORD * i + lowest(left) + 1] += 1
                left = without_lowest(left)
    for channel in range(1, ends.size):
        ends[channel] += ends[channel - 1]
    for pixel in range(first, last):
        place = (pixel - first) // width * stride + (pixel - first) % width
        for i in range(words.shape[1]):
            left = words[pixel, i]
            while left != 0:
                channel = WORD * i + lowest(left)
                places[ends[channel]] = place
                values[ends[channel]] = x[pixel, channel] if x.size > 0 else 1
                ends[channel] += 1
                left = without_lowest(left)
