"""Average pooling without overlap on `[frames, C, H, W]`, forward and gradient by themselves (AvgPool2d).

Rows and columns that do not fill a window are left out, as torch does it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pooled_space(space: torch.Size, window: int) -> torch.Size:
    """The spatial size after pooling."""
    return torch.Size(size // window for size in space)


def average_pool(images: Tensor, window: int) -> Tensor:
    """`[frames, C, H, W]` -> `[frames, C, H // window, W // window]`."""
    return images if window == 1 else F.avg_pool2d(images, window)


def average_pool_gradient(grad: Tensor, window: int, space: torch.Size) -> Tensor:
    """The gradient of the input, whose spatial size is `space`, from that of the output."""
    # Only the shape and memory format of the input enter: the result stands for it.
    images = torch.empty(
        (*grad.shape[:2], *space), dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last
    )
    return torch.ops.aten.avg_pool2d_backward.grad_input(
        grad, images, [window] * 2, [window] * 2, [0, 0], False, True, None, grad_input=images
    )
