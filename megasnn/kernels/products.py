"""Products of a layer with weights: its output, and the gradients of its input and of its weight.

Where few values of the input are not 0, the output and the weight gradient are sums over these
(`megasnn.kernels.numba.spike_sums`): the terms of the dense product, without those that are 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from megasnn.kernels.convolution import Geometry, add_product, add_weight_gradient, convolve, input_gradient
from megasnn.kernels.numba.spike_sums import TYPES, has_loops
from megasnn.kernels.numba.spike_sums import add_weight_gradient as add_sparse_weight_gradient
from megasnn.kernels.numba.spike_sums import add_weight_gradient_of_bits as add_sparse_weight_gradient_of_bits
from megasnn.kernels.numba.spike_sums import output as sparse_output


@dataclass(frozen=True)
class Products(ABC):
    """
    Attributes:
        sparse: True to sum over the values of the input that are not 0, where these are few.
    """

    sparse: bool = False

    @abstractmethod
    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """Computes the layer's output, without bias."""

    @abstractmethod
    def input_gradient(self, grad: Tensor, weight: Tensor, space: torch.Size) -> Tensor:
        """Computes the gradient of the input. `space`: height and width of the input, as `Geometry` knows it."""

    @abstractmethod
    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        """Adds the gradient of the weight to `total`."""

    def add_weight_gradient_of_bits(self, total: Tensor, grad: Tensor, packed: Tensor, shape: torch.Size) -> bool:
        """Adds the same for packed spikes of this shape (channels last); False where they must be unpacked for it."""
        return False


@dataclass(frozen=True)
class MatrixProducts(Products):
    """Products of rows `[R, in]` and a weight `[out, in]`, which have no space."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        y = sparse_output(_as_images(x), _as_images(weight), Geometry()) if self.sparse else None
        return x @ weight.t() if y is None else y.flatten(1)

    def input_gradient(self, grad: Tensor, weight: Tensor, space: torch.Size) -> Tensor:
        return grad @ weight

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        images = _as_images(total), _as_images(grad), _as_images(x)
        if not self.sparse or not add_sparse_weight_gradient(*images, Geometry()):
            add_product(total, grad.t(), x)


def _as_images(rows: Tensor) -> Tensor:
    """Views `[R, C]` as `[R, C, 1, 1]`."""
    return rows[:, :, None, None]


@dataclass(frozen=True)
class ConvolutionProducts(Products):
    """Products of images `[frames, C_in, H, W]` and a weight `[C_out, C_in / groups, k, k]`."""

    geometry: Geometry = Geometry()

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        y = sparse_output(x, weight, self.geometry) if self.sparse else None
        return convolve(x, weight, self.geometry) if y is None else y

    def input_gradient(self, grad: Tensor, weight: Tensor, space: torch.Size) -> Tensor:
        return input_gradient(grad, weight, self.geometry, space)

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        if not self.sparse or not add_sparse_weight_gradient(total, grad, x, self.geometry):
            add_weight_gradient(total, grad, x, self.geometry)

    def add_weight_gradient_of_bits(self, total: Tensor, grad: Tensor, packed: Tensor, shape: torch.Size) -> bool:
        return self.sparse and add_sparse_weight_gradient_of_bits(total, grad, packed, shape, self.geometry)


def can_be_sparse(device: torch.device, dtype: torch.dtype) -> bool:
    """True where sums over spikes are compiled: on a CPU, in float32 and float64."""
    return device.type == "cpu" and dtype in TYPES and has_loops()
