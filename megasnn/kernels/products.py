"""Kernels for a layer's products: the convolution of its input, and the gradient of its weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megasnn.kernels.convolution import Geometry, add_weight_gradient, convolve
from megasnn.kernels.numba.spike_sums import (
    SUMMED_TYPES,
    add_sparse_weight_gradient,
    add_sparse_weight_gradient_of_bits,
    sparse_output,
)


@dataclass(frozen=True)
class Products:
    """Convolution of images `[frames, C_in, H, W]` with a weight `[C_out, C_in / groups, k, k]`.

    A linear layer's rows are images with one pixel. With `sparse`, `megasnn.kernels.numba.spike_sums` sums over the
    input's nonzero values alone, where these are few.
    """

    sparse: bool = False
    geometry: Geometry = Geometry()

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution, without bias."""
        y = sparse_output(x, weight, self.geometry) if self.sparse else None
        return convolve(x, weight, self.geometry) if y is None else y

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        if not self.sparse or not add_sparse_weight_gradient(total, grad, x, self.geometry):
            add_weight_gradient(total, grad, x, self.geometry)

    def add_weight_gradient_of_bits(self, total: Tensor, grad: Tensor, packed: Tensor, shape: torch.Size) -> bool:
        """`add_weight_gradient` from packed spikes, channels last. Returns False if they must be unpacked."""
        return self.sparse and add_sparse_weight_gradient_of_bits(total, grad, packed, shape, self.geometry)


def can_be_sparse(device: torch.device, dtype: torch.dtype) -> bool:
    """True where sums over spikes are compiled: on a CPU, in float32 and float64."""
    return device.type == "cpu" and dtype in SUMMED_TYPES
