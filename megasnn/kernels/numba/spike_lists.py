"""Lists of the places of spikes, from the bits that `megasnn.kernels.spike_codec` packs.

`bits [pixels, C / 8]` are those of an input with its channels last; `x [pixels, C]` are its values, or an array without
elements, where all that are not 0 are 1.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from megasnn.kernels.numba.jit import part

WORD = 64
"""Bits that are looked through at once."""


def _word(context, bits, pixel, byte):
    """Eight bytes from `bits[pixel, byte]` on, or what is left of the row, as a number."""

    def generate(context, builder, signature, args):
        struct = context.make_array(bits)(context, builder, args[0])
        columns = cgutils.unpack_tuple(builder, struct.shape)[1]
        whole, single = ir.IntType(64), ir.IntType(8)
        place = builder.gep(struct.data, [builder.add(builder.mul(args[1], columns), args[2])])
        found = cgutils.alloca_once(builder, whole)
        left = builder.sub(columns, args[2])
        with builder.if_else(builder.icmp_signed(">=", left, whole(8))) as (all_of_it, the_rest):
            with all_of_it:
                builder.store(builder.load(builder.bitcast(place, whole.as_pointer()), align=1), found)
            with the_rest:
                builder.store(whole(0), found)
                with cgutils.for_range(builder, left) as loop:
                    byte = builder.load(builder.gep(place, [loop.index]))
                    shifted = builder.shl(builder.zext(byte, whole), builder.mul(loop.index, whole(single.width)))
                    builder.store(builder.or_(builder.load(found), shifted), found)
        return builder.load(found)

    return types.uint64(bits, types.intp, types.intp), generate


def _lowest(context, word):
    """The place of the lowest bit of a number that is not 0."""

    def generate(context, builder, signature, args):
        kind = args[0].type
        function = ir.FunctionType(kind, [kind, ir.IntType(1)])
        call = cgutils.get_or_insert_function(builder.module, function, f"llvm.cttz.i{kind.width}")
        return builder.call(call, [args[0], ir.IntType(1)(1)])

    return types.intp(types.uint64), generate


def _without_lowest(context, word):
    """The number without its lowest bit."""

    def generate(context, builder, signature, args):
        return builder.and_(args[0], builder.sub(args[0], args[0].type(1)))

    return types.uint64(types.uint64), generate


word: Any = intrinsic(_word)
lowest: Any = intrinsic(_lowest)
without_lowest: Any = intrinsic(_without_lowest)


@part
def by_pixel(bits, x, first, last, starts, channels, values):
    """Lists for pixels `first` to `last` the channels that are not 0, in their order, and their values.

    Those of the w-th 64 channels of the i-th pixel lie from `starts[i * words + w]` to the next start.
    """
    count, entry = 0, 0
    for pixel in range(first, last):
        for byte in range(0, bits.shape[1], WORD // 8):
            starts[entry] = count
            entry += 1
            left = word(bits, pixel, byte)
            while left != 0:
                channel = 8 * byte + lowest(left)
                channels[count] = channel
                values[count] = x[pixel, channel] if x.size > 0 else 1
                count += 1
                left = without_lowest(left)
    starts[entry] = count


@part
def by_channel(bits, x, first, last, width, stride, ends, places, values):
    """Lists for each channel the pixels from `first` to `last` where it is not 0, in their order, and their values.

    Those of a channel lie from the end of the one before to `ends[channel]`, which while they are filled in is how far
    that has come. Pixels are counted from `first` on, in lines of `width` that begin `stride` places apart.
    """
    ends[:] = 0
    for pixel in range(first, last):
        for byte in range(0, bits.shape[1], WORD // 8):
            left = word(bits, pixel, byte)
            while left != 0:
                ends[8 * byte + lowest(left) + 1] += 1
                left = without_lowest(left)
    for channel in range(1, ends.size):
        ends[channel] += ends[channel - 1]
    for pixel in range(first, last):
        place = (pixel - first) // width * stride + (pixel - first) % width
        for byte in range(0, bits.shape[1], WORD // 8):
            left = word(bits, pixel, byte)
            while left != 0:
                channel = 8 * byte + lowest(left)
                places[ends[channel]] = place
                values[ends[channel]] = x[pixel, channel] if x.size > 0 else 1
                ends[channel] += 1
                left = without_lowest(left)
