"""Convolution and average pooling on `[frames, C, H, W]`, channels last, forward and each gradient by themselves.

Pooling is without overlap (AvgPool2d); rows and columns that do not fill a window are left out, as torch does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 1024
FEW_SUMMED_ROWS = 2048
FEW_FRAMES = 16


@dataclass(frozen=True)
class Geometry:
    """Stride, padding with zeros and dilation along height and width, and groups, as in torch."""

    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1


def output_space(space: torch.Size, sides: torch.Size, geometry: Geometry) -> torch.Size:
    """Height and width of the output, from those of the input and of the kernel."""
    along = zip(space, sides, geometry.stride, geometry.padding, geometry.dilation, strict=True)
    return torch.Size((size + 2 * pad - far * (side - 1) - 1) // step + 1 for size, side, step, pad, far in along)


def convolve(images: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """`[frames, C_in, H, W]` and `[C_out, C_in / groups, k, k]` -> `[frames, C_out, H', W']`."""
    if _is_matrix_product(images, weight, geometry):
        pixels = images.movedim(1, -1)
        rows = pixels.reshape(-1, images.shape[1]) @ weight.flatten(1).t()
        return rows.view(*pixels.shape[:-1], -1).movedim(-1, 1)
    return torch.conv2d(images, weight, None, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)


def convolution_input_gradient(grad: Tensor, weight: Tensor, geometry: Geometry, space: torch.Size) -> Tensor:
    """The gradient of the input, whose spatial size is `space`, from that of the output."""
    if _is_matrix_product(grad, weight, geometry):
        rows = grad.movedim(1, -1).reshape(-1, grad.shape[1]) @ weight.flatten(1)
        return rows.view(grad.shape[0], *space, -1).movedim(-1, 1)
    if grad.device.type != "cpu" and geometry.groups == 1:
        return _transposed(grad, weight, geometry, space)
    # Only the shape and memory format of the input enter its gradient; a CPU gives no memory to what is not written to.
    shape = (grad.shape[0], weight.shape[1] * geometry.groups, *space)
    images = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
    return _convolution_backward(grad, images, weight, geometry, (True, False, False))[0]


def _transposed(grad: Tensor, weight: Tensor, geometry: Geometry, space: torch.Size) -> Tensor:
    """The same by a transposed convolution, which a GPU computes alike, and which takes no tensor for a shape."""
    stride, padding, dilation = geometry.stride, geometry.padding, geometry.dilation
    sides = zip(space, grad.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    left = [size - ((n - 1) * step - 2 * pad + far * (k - 1) + 1) for size, n, k, step, pad, far in sides]
    return torch.conv_transpose2d(grad, weight, None, stride, padding, left, geometry.groups, dilation)


def add_weight_gradient(total: Tensor, grad: Tensor, images: Tensor, geometry: Geometry) -> None:
    """Adds the gradient of the weight to `total` `[C_out, C_in / groups, k, k]`, which may be of higher precision.

    Args:
        grad: of the output. images: the input.
    """
    if _is_matrix_product(images, total, geometry, FEW_SUMMED_ROWS):
        a, b = (each.movedim(1, -1).reshape(-1, each.shape[1]) for each in (grad, images))
        if total.dtype == a.dtype:
            total.flatten(1).addmm_(a.t(), b)
        else:
            total.flatten(1).add_(a.t() @ b)
        return
    # Only the shape and type of the weight enter its gradient.
    weight = total if total.dtype == grad.dtype else torch.empty_like(total, dtype=grad.dtype)
    total += _convolution_backward(grad, images, weight, geometry, (False, True, False))[1]


def _is_matrix_product(images: Tensor, weight: Tensor, geometry: Geometry, few_rows: int = FEW_ROWS) -> bool:
    """Pointwise, on images of one pixel, or over few rows on a CPU, where a convolution spends its time on bringing the
    weight into oneDNN's order.

    Below 16 frames PyTorch even leaves oneDNN for a slow path. Over many rows the convolution is never slower, and
    twice as fast on processors that MKL is not written for. The gradient of the weight is a product for longer, since
    it is added where it is to be, and what a convolution gives is brought into order and then added.
    """
    if weight.shape[2:] != (1, 1) or geometry != Geometry():
        return False
    few = images.shape[0] < FEW_FRAMES or images.numel() // images.shape[1] < few_rows
    return images.shape[2:] == (1, 1) or (images.device.type == "cpu" and few)


def _convolution_backward(
    grad: Tensor, images: Tensor, weight: Tensor, geometry: Geometry, mask: tuple[bool, ...]
) -> Any:
    stride, padding, dilation = (list(each) for each in (geometry.stride, geometry.padding, geometry.dilation))
    return torch.ops.aten.convolution_backward(
        grad, images, weight, None, stride, padding, dilation, False, [0, 0], geometry.groups, list(mask)
    )


def pooled_space(space: torch.Size, window: int) -> torch.Size:
    """The spatial size after pooling."""
    return torch.Size(size // window for size in space)


def average_pool(images: Tensor, window: int) -> Tensor:
    """`[frames, C, H, W]` -> `[frames, C, H // window, W // window]`."""
    if window == 1:
        return images
    return mean_of_windows(images, window) if images.is_cuda else F.avg_pool2d(images, window)


def average_pool_gradient(grad: Tensor, window: int, space: torch.Size) -> Tensor:
    """The gradient of the input, whose spatial size is `space`, from that of the output."""
    # Only the shape and memory format of the input enter: the result stands for it.
    images = torch.empty(
        (*grad.shape[:2], *space), dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last
    )
    if grad.is_cuda:
        return spread_over_windows(grad, window, images)
    return torch.ops.aten.avg_pool2d_backward.grad_input(
        grad, images, [window] * 2, [window] * 2, [0, 0], False, True, None, grad_input=images
    )


# torch's pooling of images with the channels last took a third of a step of the VGG on an H200, at 0.3 TB/s of 4.


def mean_of_windows(images: Tensor, window: int) -> Tensor:
    """`average_pool` by a sum over views, in the order of memory."""
    return _windows(images, window).mean((2, 4)).movedim(-1, 1)


def spread_over_windows(grad: Tensor, window: int, images: Tensor) -> Tensor:
    """Writes the gradient of the pooling's input into `images`."""
    if any(size % window for size in images.shape[2:]):
        images.zero_()  # pixels in no window
    _windows(images, window).copy_((grad / window**2).movedim(1, -1)[:, :, None, :, None])
    return images


def _windows(images: Tensor, window: int) -> Tensor:
    """View of the pixels that are pooled: `[frames, C, H, W]` -> `[frames, H', window, W', window, C]`."""
    height, width = pooled_space(images.shape[2:], window)
    pixels = images.movedim(1, -1)[:, : height * window, : width * window]
    return pixels.unflatten(2, (width, window)).unflatten(1, (height, window))
