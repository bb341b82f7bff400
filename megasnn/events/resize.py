"""Scaling of event frames."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


def resize_frames(frames: NDArray[Any], size: int) -> NDArray[np.float32]:
    """Frames [..., H, W] scaled to [..., size, size]: bilinear, each new pixel a mean over all it covers (antialiased).

    That is torchvision's `Resize`, with which the literature scales CIFAR10-DVS from 128 to 48: Deng et al. 2022 (TET)
    as images, after normalising; SpikingJelly's example of memory optimisation as tensors of plain counts (which
    torchvision antialiases since 0.17). Values are means of counts, no sums: their scale does not depend on the size.
    """
    height, width = frames.shape[-2:]
    rows, columns = _weights(height, size), _weights(width, size)
    return rows @ frames.astype(np.float32, copy=False) @ columns.T


@lru_cache(maxsize=16)
def _weights(old: int, new: int) -> NDArray[np.float32]:
    """Matrix [new, old] of the triangle filter, as wide as a new pixel when scaling down, one old pixel when up."""
    scale = old / new
    support = max(scale, 1.0)
    centers = (np.arange(new) + 0.5) * scale
    distance = np.abs(np.arange(old) + 0.5 - centers[:, None]) / support
    weights = np.maximum(1 - distance, 0)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
