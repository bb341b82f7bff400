"""Average pooling without overlap on `[frames, C, H, W]`, forward and gradient by themselves (AvgPool2d).

Rows and columns that do not fill a window are left out, as torch does it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megasnn.kernels.triton.available import MOST_VALUES, usable_on


def pooled_space(space: torch.Size, window: int) -> torch.Size:
    """The spatial size after pooling."""
    return torch.Size(size // window for size in space)


def average_pool(images: Tensor, window: int) -> Tensor:
    """`[frames, C, H, W]` -> `[frames, C, H // window, W // window]`."""
    return images if window == 1 else F.avg_pool2d(images, window)


def average_pool_of_bits(packed: Tensor, shape: torch.Size, window: int, dtype: torch.dtype) -> Tensor | None:
    """The same of spikes `[frames, C, H, W]` that `codec.pack_bits` has packed, channels last, in one pass over memory;
    None where there is no kernel for it."""
    frames, channels, height, width = shape
    out_height, out_width = pooled_space(shape[2:], window)
    largest = max(packed.numel(), frames * out_height * out_width * channels)
    if window == 1 or channels % 8 or largest > MOST_VALUES or not usable_on(packed.device):
        return None
    from megasnn.kernels.triton.codec import average_bits_into

    pooled = packed.new_empty((frames, out_height, out_width, channels), dtype=dtype)
    average_bits_into(packed, pooled, height, width, window)
    return pooled.movedim(-1, 1)


def average_pool_gradient(grad: Tensor, window: int, space: torch.Size) -> Tensor:
    """The gradient of the input, whose spatial size is `space`, from that of the output."""
    # Only the shape and memory format of the input enter: the result stands for it.
    images = torch.empty(
        (*grad.shape[:2], *space), dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last
    )
    return torch.ops.aten.avg_pool2d_backward.grad_input(
        grad, images, [window] * 2, [window] * 2, [0, 0], False, True, None, grad_input=images
    )
