"""The loops that add up rows of a weight, or of a gradient, where the input of a convolution is not 0. They must equal
`convolve` and `add_weight_gradient` of convolution.py.

A sum stays in registers while its rows come from the nearest caches: columns are cut into blocks of as many as the
registers hold, `cuts [blocks, 2]`, the first column of each and how many half lines of the cache it has. The terms of
an output are added one after the other, by row, column and channel of the kernel, as one dense sum would add them.

Lists of the positions of spikes come from the bits that `megasnn.kernels.spike_codec` packs. `words [pixels, C / 64]`,
rounded up, are the bits of an input with its channels last. `x [pixels, C]` are its values, or an array without
elements, where every value that is not 0 is 1. `weight` is `[kh kw C, out]`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.cpython.unsafe import numbers

from megasnn.kernels.numba.jit import kernel, part
from megasnn.kernels.numba.lanes import count_of, lanes, load, multiply_add, store

HALF_LINE = 32  # bytes
BLOCKS = (48, 24, 16, 12, 8, 6, 4, 2, 1)
"""How many half lines a block may have. The largest takes 24 of 32 registers of the widest kind."""
_trailing_zeros: Any = numbers.trailing_zeros
WORD_BITS = 64
"""Bits that are looked through at once."""


@part
def sum_rows(like, rest, spikes, weight, out, column, band, sizes, steps, offsets, at_once):
    """A block of columns of a unit's outputs."""
    starts, channels_of, values = spikes
    before, low, high, top = band
    height, width, _, out_width = sizes
    down, right = steps
    (taps, words), places, second = at_once, len(offsets), column + count_of(like)
    channels = weight.shape[0] // places
    all_words = -(-channels // WORD_BITS)
    for tap in range(0, places, taps):
        for word in range(0, all_words, words):
            last_word = min(all_words, word + words)
            for y in range(low, high):
                for x in range(out_width):
                    to = (before + y) * out_width + x
                    a, b = like, rest
                    if tap + word > 0:
                        a, b = load(out, to, column, like), load(out, to, second, rest)
                    for place in range(tap, min(places, tap + taps)):
                        at_y, at_x = y * down + offsets[place, 0], x * right + offsets[place, 1]
                        if 0 <= at_y < height and 0 <= at_x < width:
                            of_pixel = ((at_y - top) * width + at_x) * all_words
                            for k in range(starts[of_pixel + word], starts[of_pixel + last_word]):
                                row, value = place * channels + channels_of[k], values[k]
                                a = multiply_add(load(weight, row, column, like), value, a)
                                b = multiply_add(load(weight, row, second, rest), value, b)
                    store(out, to, column, a)
                    store(out, to, second, b)


@part
def add_gradient_rows(like, rest, spikes, padded, total, column, stride, offsets):
    """To a block of columns of `total` what the gradients at spikes of some rows add up to."""
    ends, pixels, values = spikes
    channels, second = ends.size - 1, column + count_of(like)
    for place in range(len(offsets)):
        up, left = offsets[-1, 0] - offsets[place, 0], offsets[-1, 1] - offsets[place, 1]
        offset = up * stride + left
        start = ends[0] - ends[0]
        for channel in range(channels):
            end = ends[channel]
            if end > start:
                a, b = like, rest
                for k in range(start, end):
                    row, value = offset + pixels[k], values[k]
                    a = multiply_add(load(padded, row, 0, like), value, a)
                    b = multiply_add(load(padded, row, count_of(like), rest), value, b)
                row = place * channels + channel
                store(total, row, column, load(total, row, column, like) + a)
                store(total, row, second, load(total, row, second, rest) + b)
            start = end


def for_blocks(work: Any) -> Any:
    """A part that calls `work` with lanes for a block of so many half lines, full of zeros."""

    @part
    def call(halves, zero, arguments):
        if halves == 48:
            work(lanes(zero, 1024), lanes(zero, 512), *arguments)
        elif halves == 24:
            work(lanes(zero, 512), lanes(zero, 256), *arguments)
        elif halves == 16:
            work(lanes(zero, 256), lanes(zero, 256), *arguments)
        elif halves == 12:
            work(lanes(zero, 256), lanes(zero, 128), *arguments)
        elif halves == 8:
            work(lanes(zero, 128), lanes(zero, 128), *arguments)
        elif halves == 6:
            work(lanes(zero, 128), lanes(zero, 64), *arguments)
        elif halves == 4:
            work(lanes(zero, 64), lanes(zero, 64), *arguments)
        elif halves == 2:
            work(lanes(zero, 32), lanes(zero, 32), *arguments)
        else:
            work(lanes(zero, 16), lanes(zero, 16), *arguments)

    return call


sum_block, add_block = for_blocks(sum_rows), for_blocks(add_gradient_rows)


@kernel
def outputs(words, x, weight, out, cuts, sizes, steps, offsets, rows, at_once, first, last):
    """`out [frames H' W', out]` of a convolution.

    A slice of work are `rows` rows of the output of a frame. A part of the weight stays in the cache while all its
    pixels take their turns: `at_once` says how many places of the kernel it has, and how many words of channels, which
    are all where it has several places.

    sizes: H, W, H', W'. steps: the stride along height and width. offsets [kh kw, 2]: how far each place of the kernel
    is from there, in rows and columns.
    """
    height, width, out_height, out_width = sizes
    down, above, below = steps[0], -offsets[0, 0], offsets[-1, 0]
    channels, parts = weight.shape[0] // len(offsets), -(-out_height // rows)
    most = min(height, (rows - 1) * down + above + below + 1) * width
    starts = np.empty(most * words.shape[1] + 1, np.uint64)
    places, values = np.empty(most * channels, np.int32), np.empty(most * channels, out.dtype)
    zero = out.dtype.type(0)
    for index in range(first, last):
        frame, low = index // parts, index % parts * rows
        high = min(out_height, low + rows)
        top, bottom = max(0, low * down - above), min(height, (high - 1) * down + below + 1)
        by_pixel(words, x, (frame * height + top) * width, (frame * height + bottom) * width, starts, places, values)
        spikes, band = (starts, places, values), (frame * out_height, low, high, top)
        for i in range(cuts.shape[0]):
            column, halves = cuts[i]
            sum_block(halves, zero, (spikes, weight, out, column, band, sizes, steps, offsets, at_once))


@kernel
def weight_gradients(words, x, grad, total, seen, cuts, sizes, offsets, rows, first, last):
    """Adds to `total [kh kw C, out]` from the gradient of the output, `grad [frames H' W', out]`, where strides are 1.

    The terms of `rows` rows of the input of a frame are summed by themselves, and these sums are added one after the
    other. A slice of work is a block of columns, `cuts[unit]`. sizes, offsets: as in `outputs`. To `seen [out]` is
    added 0 times each value of the gradient: it is no longer finite where one is not, even where there is no spike.
    """
    height, width, out_height, out_width = sizes
    channels, frames = total.shape[0] // len(offsets), words.shape[0] // (height * width)
    (up, left), (down, right) = offsets[0], offsets[-1]
    above, before = down - up, right - left
    stride = width + before
    ends, places = np.empty(channels + 1, np.uint64), np.empty(rows * width * channels, np.int32)
    values, zero = np.empty(rows * width * channels, grad.dtype), grad.dtype.type(0)
    padded = np.zeros(((rows + above) * stride, HALF_LINE * BLOCKS[0] // grad.itemsize), grad.dtype)
    for frame in range(frames):
        for low in range(0, height, rows):
            high = min(height, low + rows)
            start = (frame * height + low) * width
            by_channel(words, x, start, (frame * height + high) * width, width, stride, ends, places, values)
            spikes = ends, places, values
            for index in range(first, last):
                column, halves = cuts[index]
                columns = halves * HALF_LINE // grad.itemsize
                for y in range(high - low + above):
                    at_y = low - down + y
                    for i in range(stride):
                        at_x = i - right
                        row = padded[y * stride + i]
                        if 0 <= at_y < out_height and 0 <= at_x < out_width:
                            source = grad[(frame * out_height + at_y) * out_width + at_x, column:]
                            found = seen[column:]
                            for c in range(columns):
                                row[c] = source[c]
                                found[c] += zero * source[c]
                        else:
                            row[:columns] = 0
                add_block(halves, zero, (spikes, padded, total, column, stride, offsets))


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
                channel = WORD_BITS * i + lowest(left)
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
                ends[WORD_BITS * i + lowest(left) + 1] += 1
                left = without_lowest(left)
    for channel in range(1, ends.size):
        ends[channel] += ends[channel - 1]
    for pixel in range(first, last):
        place = (pixel - first) // width * stride + (pixel - first) % width
        for i in range(words.shape[1]):
            left = words[pixel, i]
            while left != 0:
                channel = WORD_BITS * i + lowest(left)
                places[ends[channel]] = place
                values[ends[channel]] = x[pixel, channel] if x.size > 0 else 1
                ends[channel] += 1
                left = without_lowest(left)
