"""Kernels that sum rows of a weight, or of a gradient, where a convolution's input is not 0.

They must equal convolution.py's `convolve` and `add_weight_gradient`. `words [pixels, C / 64]`, rounded up, are bits
packed as in `megasnn.kernels.spike_codec`, channels last. `x [pixels, C]` are the input's values, or an empty array
where all nonzero values are 1. `weight` is `[kh kw C, out]`. `cuts [blocks, 2]`: each block's first column and number
of half cache lines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.cpython.unsafe import numbers

from megasnn.kernels.numba.jit import kernel, part
from megasnn.kernels.numba.lanes import count_of, lanes, load, multiply_add, store

# A sum stays in registers while its rows come from the nearest caches: columns are cut into blocks that fit in the
# registers. The terms of an output are added by row, column and channel of the kernel, in the order of one dense sum.
HALF_LINE = 32  # bytes of half a cache line
BLOCKS = (48, 24, 16, 12, 8, 6, 4, 2, 1)
"""Possible numbers of half lines of a block. The largest takes 24 of the 32 widest registers."""
WORD_BITS = 64
_trailing_zeros: Any = numbers.trailing_zeros


@part
def sum_rows(like, rest, spikes, weight, out, column, band, sizes, steps, offsets, at_once):
    """Sums a column block in a work slice's outputs; `like` and `rest` are zero lanes.

    band: the frame's first output row in `out`; the slice's first and last row; first listed input row.
    """
    starts, channels_of, values = spikes
    before, low, high, top = band
    height, width, _, out_width = sizes
    down, right = steps
    taps, words = at_once
    places = len(offsets)
    second = column + count_of(like)
    channels = weight.shape[0] // places
    all_words = -(-channels // WORD_BITS)
    for tap in range(0, places, taps):
        for word in range(0, all_words, words):
            last_word = min(all_words, word + words)
            for y in range(low, high):
                for x in range(out_width):
                    to = (before + y) * out_width + x
                    a = like
                    b = rest
                    if tap + word > 0:
                        a = load(out, to, column, like)
                        b = load(out, to, second, rest)
                    for place in range(tap, min(places, tap + taps)):
                        at_y = y * down + offsets[place, 0]
                        at_x = x * right + offsets[place, 1]
                        if 0 <= at_y < height and 0 <= at_x < width:
                            first_word = ((at_y - top) * width + at_x) * all_words
                            for k in range(starts[first_word + word], starts[first_word + last_word]):
                                row = place * channels + channels_of[k]
                                value = values[k]
                                a = multiply_add(load(weight, row, column, like), value, a)
                                b = multiply_add(load(weight, row, second, rest), value, b)
                    store(out, to, column, a)
                    store(out, to, second, b)


@part
def add_gradient_rows(like, rest, spikes, padded, total, column, stride, offsets):
    """Adds the gradients at some input rows' spikes to a column block of `total`."""
    ends, pixels, values = spikes
    channels = ends.size - 1
    second = column + count_of(like)
    for place in range(len(offsets)):
        up = offsets[-1, 0] - offsets[place, 0]
        left = offsets[-1, 1] - offsets[place, 1]
        offset = up * stride + left
        # 0 in the type of `ends`.
        start = ends[0] - ends[0]
        for channel in range(channels):
            end = ends[channel]
            if end > start:
                a = like
                b = rest
                for k in range(start, end):
                    row = offset + pixels[k]
                    value = values[k]
                    a = multiply_add(load(padded, row, 0, like), value, a)
                    b = multiply_add(load(padded, row, count_of(like), rest), value, b)
                row = place * channels + channel
                store(total, row, column, load(total, row, column, like) + a)
                store(total, row, second, load(total, row, second, rest) + b)
            start = end


def for_blocks(work: Any) -> Any:
    """Calls `work` with zero lanes for a block with `halves` half lines."""

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


sum_block = for_blocks(sum_rows)
add_block = for_blocks(add_gradient_rows)


@kernel
def outputs(words, x, weight, out, cuts, sizes, steps, offsets, rows, at_once, first, last):
    """Output `out [frames H' W', out]` of a convolution; a work slice is `rows` output rows in a frame.

    Args:
        sizes: H, W, H', W'.
        steps: stride along height and width.
        offsets: `[kh kw, 2]`, rows and columns from an output's input pixel to each kernel place.
        at_once: kernel places, and channel words, in a part of the weight. With several places, all words.
    """
    # Such a part stays in the cache while all pixels use it.
    height, width, out_height, out_width = sizes
    down = steps[0]
    above = -offsets[0, 0]
    below = offsets[-1, 0]
    channels = weight.shape[0] // len(offsets)
    parts = -(-out_height // rows)
    most = min(height, (rows - 1) * down + above + below + 1) * width
    starts = np.empty(most * words.shape[1] + 1, np.uint64)
    channels_of = np.empty(most * channels, np.int32)
    values = np.empty(most * channels, out.dtype)
    zero = out.dtype.type(0)
    for index in range(first, last):
        frame = index // parts
        low = index % parts * rows
        high = min(out_height, low + rows)
        top = max(0, low * down - above)
        bottom = min(height, (high - 1) * down + below + 1)
        begin = (frame * height + top) * width
        end = (frame * height + bottom) * width
        by_pixel(words, x, begin, end, starts, channels_of, values)
        spikes = (starts, channels_of, values)
        band = (frame * out_height, low, high, top)
        for i in range(cuts.shape[0]):
            column, halves = cuts[i]
            sum_block(halves, zero, (spikes, weight, out, column, band, sizes, steps, offsets, at_once))


@kernel
def weight_gradients(words, x, grad, total, seen, cuts, sizes, offsets, rows, first, last):
    """Adds the weight gradient to `total [kh kw C, out]`, from `grad [frames H' W', out]`; stride 1.

    A work slice is a column block. `seen [out]` collects 0 times each gradient. sizes, offsets: as in `outputs`.
    """
    # The terms of `rows` input rows of a frame are summed by themselves, and these sums are added one after the other.
    # `seen` becomes NaN where a gradient is not finite, even without a spike there.
    height, width, out_height, out_width = sizes
    channels = total.shape[0] // len(offsets)
    frames = words.shape[0] // (height * width)
    up, left = offsets[0]
    down, right = offsets[-1]
    above = down - up
    stride = width + right - left
    ends = np.empty(channels + 1, np.uint64)
    pixels = np.empty(rows * width * channels, np.int32)
    values = np.empty(rows * width * channels, grad.dtype)
    zero = grad.dtype.type(0)
    padded = np.zeros(((rows + above) * stride, HALF_LINE * BLOCKS[0] // grad.itemsize), grad.dtype)
    for frame in range(frames):
        for low in range(0, height, rows):
            high = min(height, low + rows)
            start = (frame * height + low) * width
            by_channel(words, x, start, (frame * height + high) * width, width, stride, ends, pixels, values)
            spikes = (ends, pixels, values)
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
    """Position of a word's lowest set bit; the word is not 0."""
    return np.intp(_trailing_zeros(word))


@part
def without_lowest(word):
    return word & (word - np.uint64(1))


@part
def by_pixel(words, x, first, last, starts, channels, values):
    """Lists the nonzero channels in pixels `first` to `last`, in their order, and their values.

    The list for the i-th pixel's word w begins at `starts[i * words + w]` and ends at the next start.
    """
    count = 0
    entry = 0
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
def by_channel(words, x, first, last, width, stride, ends, pixels, values):
    """Lists each channel's nonzero pixels from `first` to `last`, in their order, and their values.

    A channel's list ends at `ends[channel]`, where the next begins. Pixels are counted from `first` on, in lines with
    `width` pixels that begin `stride` places apart.
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
    # ends[channel] is now the start of that channel's list, and moves on to its end as the list is filled.
    for pixel in range(first, last):
        place = (pixel - first) // width * stride + (pixel - first) % width
        for i in range(words.shape[1]):
            left = words[pixel, i]
            while left != 0:
                channel = WORD_BITS * i + lowest(left)
                pixels[ends[channel]] = place
                values[ends[channel]] = x[pixel, channel] if x.size > 0 else 1
                ends[channel] += 1
                left = without_lowest(left)
