"""The three products of a layer with weights: its output, and the gradients of its input and of its weight.

Each can be formed as it is, or split into products of TF32 (`megasnn.kernels.split`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from megasnn.kernels.convolution import Geometry, add_product, add_weight_gradient, convolve, input_gradient
from megasnn.kernels.split import piece_pairs, split_product
from megasnn.kernels.tensor_cores import rounding_products

Kind = Literal["output", "input gradient", "weight gradient"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Chosen = TypeVar("Chosen", bound="Products")


@dataclass(frozen=True)
class Products(ABC):
    """
    Attributes:
        exact: no value of the input needs more bits than TF32 has. Products of other layers are not split: their sums
            are often short, and then the errors are larger.
        split: the products that are split; their operands are float32.
    """

    exact: bool = False
    split: frozenset[Kind] = frozenset()

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        if "output" in self.split:
            return split_product(self._output, x, weight, a_is_exact=True)
        return self._output(x, weight)

    def input_gradient(self, grad: Tensor, weight: Tensor, space: torch.Size) -> Tensor:
        """Args: grad: of the output. space: of the input, as `Geometry` knows it."""
        if "input gradient" in self.split:
            return split_product(lambda g, w: self._input_gradient(g, w, space), grad, weight, a_is_exact=False)
        return self._input_gradient(grad, weight, space)

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        """Adds it to `total`. Args: grad: of the output. x: the input."""
        if "weight gradient" not in self.split:
            self._add_weight_gradient(total, grad, x)
            return
        with rounding_products():
            for x_piece, grad_piece in piece_pairs(x, grad, a_is_exact=True):
                self._add_weight_gradient(total, grad_piece, x_piece)

    @abstractmethod
    def _output(self, x: Tensor, weight: Tensor) -> Tensor: ...

    @abstractmethod
    def _input_gradient(self, grad: Tensor, weight: Tensor, space: torch.Size) -> Tensor: ...

    @abstractmethod
    def _add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor) -> None: ...


@dataclass(frozen=True)
class MatrixProducts(Products):
    """Of rows `[R, in]` and a weight `[out, in]`, which have no space."""

    def _output(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    def _input_gradient(self, grad: Tensor, weight: Tensor, space: torch.Size) -> Tensor:
        return grad @ weight

    def _add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        add_product(total, grad.t(), x)


@dataclass(frozen=True)
class ConvolutionProducts(Products):
    """Of images `[frames, C_in, H, W]` and a weight `[C_out, C_in / groups, k, k]`."""

    geometry: Geometry = Geometry()

    def _output(self, x: Tensor, weight: Tensor) -> Tensor:
        return convolve(x, weight, self.geometry)

    def _input_gradient(self, grad: Tensor, weight: Tensor, space: torch.Size) -> Tensor:
        return input_gradient(grad, weight, self.geometry, space)

    def _add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        add_weight_gradient(total, grad, x, self.geometry)


class LayerShape(NamedTuple):
    """What decides how fast a layer's products are, and how large their errors.

    Attributes:
        products: without any that is split.
        weight: shape of the weight.
        frames: of a sample: time steps of a convolution, rows of a product of matrices.
        space: height and width of a convolution's input; empty for a product of matrices.
    """

    products: Products
    weight: torch.Size
    frames: int
    space: torch.Size


class ProductChoice:
    """Which products of a model's layers are split, and which layers have asked.

    Args:
        everywhere: those of all layers that `of_shape` does not name.
        of_shape: those of layers of a shape.
        told: for the log.
    Attributes:
        shapes: of the layers that were built and whose products can be split, each once, in their order.
    """

    def __init__(
        self,
        everywhere: frozenset[Kind] = frozenset(),
        of_shape: dict[LayerShape, frozenset[Kind]] | None = None,
        told: tuple[str, ...] = (),
    ) -> None:
        self._everywhere, self._of_shape, self.told = everywhere, of_shape or {}, told
        self._asked: dict[LayerShape, None] = {}

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        return tuple(self._asked)

    def applied(self, products: Chosen, weight: torch.Size, frames: int, space: torch.Size) -> Chosen:
        """A layer's products, with those that are to be split. Args: as the fields of LayerShape."""
        if not products.exact:
            return replace(products, split=frozenset())
        shape = LayerShape(replace(products, split=frozenset()), weight, frames, space)
        self._asked[shape] = None
        return replace(products, split=self._of_shape.get(shape, self._everywhere))
