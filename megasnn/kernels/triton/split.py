"""Pieces of float32 for products of TF32, and convolutions that form all products of pieces in one pass.

See `megasnn.kernels.split` for what pieces are. Images are `[N, H, W, C]` in memory, weights `[out, h, w, in]`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megasnn.kernels.convolution import Geometry, output_space
from megasnn.kernels.triton.available import MOST_VALUES
from megasnn.kernels.triton.launch import launch, operator

_BLOCK = 1024  # values of a program
_TILE = {"PIXELS": 128, "OUTPUTS": 64, "CHANNELS": 32}
_SIZES = (
    *("pixels", "height", "width", "out_height", "out_width", "stride_h", "stride_w"),
    *("pad_h", "pad_w", "far_h", "far_w", "side_h", "side_w"),
)
"""Of a convolution: one compiled kernel is for all of them, so that few are compiled."""


@triton.jit
def large_piece(x):
    """x in 11 significant bits, rounded."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def small_piece(x, large):
    """What the large piece lacks, cut off after 11 significant bits."""
    return ((x - large).to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@operator("x", "large small")
@triton.jit
def pieces_kernel(x, large, small, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < size, other=0)
    first = large_piece(value)
    tl.store(large + place, first, mask=place < size)
    tl.store(small + place, small_piece(value, first), mask=place < size)


@operator("x large small", "y")
@triton.jit(do_not_specialize=_SIZES)
def split_convolution_kernel(x, large, small, y, pixels, channels, outputs, height, width, out_height, out_width,
                             stride_h, stride_w, pad_h, pad_w, far_h, far_w, side_h, side_w,
                             EXACT: tl.constexpr, PIXELS: tl.constexpr, OUTPUTS: tl.constexpr,
                             CHANNELS: tl.constexpr):  # fmt: skip
    """Sums of products with the large pieces and of the others are kept apart until the end.

    Args:
        pixels: of the whole output. far_h, far_w: dilation.
        EXACT: x needs no more bits than TF32 has; otherwise it is split as well.
    """
    blocks = tl.cdiv(outputs, OUTPUTS)
    pixel = tl.program_id(0) // blocks * PIXELS + tl.arange(0, PIXELS)
    output = tl.program_id(0) % blocks * OUTPUTS + tl.arange(0, OUTPUTS)
    column, line = pixel % out_width * stride_w - pad_w, pixel // out_width
    row, sample = line % out_height * stride_h - pad_h, line // out_height
    start = (sample * height + row) * width + column
    parts = tl.cdiv(channels, CHANNELS)
    of_large = tl.zeros([PIXELS, OUTPUTS], tl.float32)
    of_small = tl.zeros([PIXELS, OUTPUTS], tl.float32)
    for k in range(side_h * side_w * parts):
        tap = k // parts
        channel = k % parts * CHANNELS + tl.arange(0, CHANNELS)
        down, right = tap // side_w * far_h, tap % side_w * far_w
        valid = (pixel < pixels) & (row + down >= 0) & (row + down < height)
        valid = valid & (column + right >= 0) & (column + right < width)
        place = (start + down * width + right) * channels
        a = tl.load(x + place[:, None] + channel[None, :], mask=valid[:, None] & (channel < channels)[None, :], other=0)
        place = (output * (side_h * side_w) + tap) * channels
        place = place[None, :] + channel[:, None]
        there = (output < outputs)[None, :] & (channel < channels)[:, None]
        b_large = tl.load(large + place, mask=there, other=0)
        b_small = tl.load(small + place, mask=there, other=0)
        if EXACT:
            of_small = tl.dot(a, b_small, of_small, input_precision="tf32")
            of_large = tl.dot(a, b_large, of_large, input_precision="tf32")
        else:
            a_large = large_piece(a)
            of_small = tl.dot(small_piece(a, a_large), b_large, of_small, input_precision="tf32")
            of_small = tl.dot(a_large, b_small, of_small, input_precision="tf32")
            of_large = tl.dot(a_large, b_large, of_large, input_precision="tf32")
    target = y + pixel[:, None] * outputs + output[None, :]
    tl.store(target, of_small + of_large, mask=(pixel < pixels)[:, None] & (output < outputs)[None, :])


def two_pieces(values: Tensor) -> list[Tensor]:
    """As `split.pieces` gives them, in one pass over memory, of a dense tensor."""
    large, small = torch.empty_like(values), torch.empty_like(values)
    if values.numel():
        launch(pieces_kernel, -(-values.numel() // _BLOCK), values, large, small, values.numel(), BLOCK=_BLOCK)
    return [large, small]


def takes(images: Tensor, weight: Tensor, geometry: Geometry, gradient: bool) -> bool:
    """Whether `split_convolution` can compute it, or with `gradient` `split_input_gradient`."""
    along = zip(images.shape[2:], weight.shape[2:], geometry.padding, geometry.dilation, strict=True)
    space = math.prod(size + 2 * pad + far * (side - 1) for size, side, pad, far in along)
    fits = 0 < len(images) * space * max(weight.shape[:2]) <= MOST_VALUES
    return fits and geometry.groups == 1 and (not gradient or geometry.stride == (1, 1))


def split_convolution(images: Tensor, weight: Tensor, geometry: Geometry, exact: bool) -> Tensor:
    """`convolve`, from pieces. Args: exact: no value of `images` needs more bits than TF32 has."""
    images = images.contiguous(memory_format=torch.channels_last)
    large, small = two_pieces(weight.contiguous(memory_format=torch.channels_last))
    outputs, channels, *sides = weight.shape
    out_height, out_width = output_space(images.shape[2:], weight.shape[2:], geometry)
    y = images.new_empty((len(images), out_height, out_width, outputs))
    pixels = y.numel() // outputs
    launch(
        split_convolution_kernel, -(-pixels // _TILE["PIXELS"]) * -(-outputs // _TILE["OUTPUTS"]),
        images, large, small, y, pixels, channels, outputs, *images.shape[2:], out_height, out_width,
        *geometry.stride, *geometry.padding, *geometry.dilation, *sides,
        EXACT=exact, **_TILE, num_warps=8,
    )  # fmt: skip
    return y.movedim(-1, 1)


def split_input_gradient(grad: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """`input_gradient` of a convolution of stride 1: a convolution as well, with the weight turned round."""
    turned = weight.transpose(0, 1).flip(2, 3)
    zipped = zip(weight.shape[2:], geometry.padding, geometry.dilation, strict=True)
    padding = tuple(far * (side - 1) - pad for side, pad, far in zipped)
    return split_convolution(grad, turned, Geometry((1, 1), padding, geometry.dilation), exact=False)
