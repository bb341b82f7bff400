"""Convolution and average pooling on `[frames, C, H, W]`, channels last, with separate gradients.

Pooling has no overlap (AvgPool2d). Rows and columns that do not fill a window are left out, as in torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 1024
"""Below this many rows a pointwise convolution on a CPU is computed as a matrix product."""
FEW_SUMMED_ROWS = 2048
"""Row limit for weight gradients."""
FEW_FRAMES = 16
"""With fewer frames, a matrix product whatever the rows."""
NARROW = 16
"""Channels below which oneDNN fills its blocks of 8 (AVX2) or 16 (AVX-512) only in part."""


@dataclass(frozen=True)
class Geometry:
    """Stride, zero padding and dilation along height and width, and groups, as in torch."""

    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1


def output_space(space: torch.Size, sides: torch.Size, geometry: Geometry) -> torch.Size:
    """Output height and width, from the input's and the kernel's."""
    result = []
    for dim in range(len(space)):
        reach = geometry.dilation[dim] * (sides[dim] - 1) + 1
        padded = space[dim] + 2 * geometry.padding[dim]
        result.append((padded - reach) // geometry.stride[dim] + 1)
    return torch.Size(result)


def convolve(images: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """`[frames, C_in, H, W]` and `[C_out, C_in / groups, k, k]` -> `[frames, C_out, H', W']`."""
    if _is_matrix_product(images, weight, geometry):
        pixels = images.movedim(1, -1)
        rows = pixels.reshape(-1, images.shape[1]) @ weight.flatten(1).t()
        return rows.view(*pixels.shape[:-1], -1).movedim(-1, 1)
    return torch.conv2d(images, weight, None, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)


def convolution_input_gradient(grad: Tensor, weight: Tensor, geometry: Geometry, space: torch.Size) -> Tensor:
    """Input gradient; `space` is the input's spatial size."""
    if _is_matrix_product(grad, weight, geometry):
        rows = grad.movedim(1, -1).reshape(-1, grad.shape[1]) @ weight.flatten(1)
        return rows.view(grad.shape[0], *space, -1).movedim(-1, 1)
    if grad.device.type != "cpu" and geometry.groups == 1:
        return _transposed(grad, weight, geometry, space)
    # torch takes only the shape and memory format of this input. A CPU gives a tensor no memory before it is written.
    shape = (grad.shape[0], weight.shape[1] * geometry.groups, *space)
    images = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
    return _convolution_backward(grad, images, weight, geometry, (True, False, False))[0]


def _transposed(grad: Tensor, weight: Tensor, geometry: Geometry, space: torch.Size) -> Tensor:
    """Input gradient by a transposed convolution."""
    # On a GPU it is the same kernel, and no tensor is made for a shape.
    output_padding = []
    for dim in range(len(space)):
        reach = geometry.dilation[dim] * (weight.shape[2 + dim] - 1) + 1
        smallest = (grad.shape[2 + dim] - 1) * geometry.stride[dim] - 2 * geometry.padding[dim] + reach
        output_padding.append(space[dim] - smallest)
    return torch.conv_transpose2d(
        grad, weight, None, geometry.stride, geometry.padding, output_padding, geometry.groups, geometry.dilation
    )


def add_weight_gradient(total: Tensor, grad: Tensor, images: Tensor, geometry: Geometry) -> None:
    """Adds the weight gradient to `total` `[C_out, C_in / groups, k, k]`, maybe in higher precision."""
    is_pointwise = total.shape[2:] == (1, 1) and geometry.padding == (0, 0)
    if is_pointwise and geometry.stride != (1, 1) and total.shape[1] < NARROW and images.device.type == "cpu":
        images, geometry = _at_stride_one(images, geometry, grad.shape[2:])
    if _is_matrix_product(images, total, geometry, FEW_SUMMED_ROWS):
        grad_rows = grad.movedim(1, -1).reshape(-1, grad.shape[1])
        rows = images.movedim(1, -1).reshape(-1, images.shape[1])
        if total.dtype == grad_rows.dtype:
            total.flatten(1).addmm_(grad_rows.t(), rows)
        else:
            total.flatten(1).add_(grad_rows.t() @ rows)
        return
    # Where images are narrower than the stride, oneDNN leaves parts of a bfloat16 weight gradient unwritten: with
    # AVX-512 it skips columns of the kernel over padding alone (seen in torch 2.13 to 2.15). In float32 it writes them.
    is_bfloat16_on_cpu = images.device.type == "cpu" and images.dtype == torch.bfloat16
    if is_bfloat16_on_cpu and images.shape[-1] < geometry.stride[-1]:
        grad = grad.float()
        images = images.float()
    # torch takes only the shape and type of this weight.
    weight = total if total.dtype == grad.dtype else torch.empty_like(total, dtype=grad.dtype)
    total += _convolution_backward(grad, images, weight, geometry, (False, True, False))[1]


def _at_stride_one(images: Tensor, geometry: Geometry, space: torch.Size) -> tuple[Tensor, Geometry]:
    """Pixels that a strided pointwise convolution reads, and its geometry on them."""
    # oneDNN, as torch 2.13 and 2.14 bring it, writes past a buffer in the weight gradient of such a convolution with
    # channels last (uxlfoundation/oneDNN issue 6035, open in November 2026). Without a stride it does not. This copy
    # can go when torch brings a oneDNN with the mend.
    down, right = geometry.stride
    read = images[:, :, ::down, ::right][:, :, : space[0], : space[1]]
    return read.contiguous(memory_format=torch.channels_last), replace(geometry, stride=(1, 1), dilation=(1, 1))


def _is_matrix_product(images: Tensor, weight: Tensor, geometry: Geometry, few_rows: int = FEW_ROWS) -> bool:
    """True for a pointwise convolution on images with one pixel, or over few rows on a CPU."""
    # Over few rows a convolution spends its time on reordering the weight for oneDNN; below 16 frames PyTorch even
    # takes a slow path without oneDNN. Over many rows the convolution is never slower, and twice as fast on processors
    # that MKL is not written for. The limit of a weight gradient is higher: the product adds it in place, and the
    # convolution returns it for reordering and adding.
    if weight.shape[2:] != (1, 1) or geometry != Geometry():
        return False
    few = images.shape[0] < FEW_FRAMES or images.numel() // images.shape[1] < few_rows
    return images.shape[2:] == (1, 1) or (images.device.type == "cpu" and few)


def _convolution_backward(
    grad: Tensor, images: Tensor, weight: Tensor, geometry: Geometry, mask: tuple[bool, ...]
) -> Any:
    stride = list(geometry.stride)
    padding = list(geometry.padding)
    dilation = list(geometry.dilation)
    return torch.ops.aten.convolution_backward(
        grad, images, weight, None, stride, padding, dilation, False, [0, 0], geometry.groups, list(mask)
    )


def pooled_space(space: torch.Size, window: int) -> torch.Size:
    return torch.Size(size // window for size in space)


def average_pool(images: Tensor, window: int) -> Tensor:
    """`[frames, C, H, W]` -> `[frames, C, H // window, W // window]`."""
    if window == 1:
        return images
    return mean_of_windows(images, window) if images.is_cuda else F.avg_pool2d(images, window)


def average_pool_gradient(grad: Tensor, window: int, space: torch.Size) -> Tensor:
    """Input gradient; `space` is the input's spatial size."""
    # torch takes only the shape and memory format of the input, so the result stands in for it.
    images = torch.empty(
        (*grad.shape[:2], *space), dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last
    )
    if grad.is_cuda:
        return spread_over_windows(grad, window, images)
    return torch.ops.aten.avg_pool2d_backward.grad_input(
        grad, images, [window] * 2, [window] * 2, [0, 0], False, True, None, grad_input=images
    )


def mean_of_windows(images: Tensor, window: int) -> Tensor:
    """`average_pool` by a sum over views, in the order of memory."""
    # torch's pooling of channels-last images took a third of a step of the VGG on an H200, at 0.3 TB/s of 4.
    return _windows(images, window).mean((2, 4)).movedim(-1, 1)


def spread_over_windows(grad: Tensor, window: int, images: Tensor) -> Tensor:
    """Writes the pooling's input gradient into `images`."""
    if any(size % window for size in images.shape[2:]):
        images.zero_()  # pixels in no window
    _windows(images, window).copy_((grad / window**2).movedim(1, -1)[:, :, None, :, None])
    return images


def _windows(images: Tensor, window: int) -> Tensor:
    """View of the pooled pixels: `[frames, C, H, W]` -> `[frames, H', window, W', window, C]`."""
    height, width = pooled_space(images.shape[2:], window)
    pixels = images.movedim(1, -1)[:, : height * window, : width * window]
    return pixels.unflatten(2, (width, window)).unflatten(1, (height, window))
