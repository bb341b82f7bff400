"""The three products of a layer with weights: its output, and the gradients of its input and of its weight.

Each can be formed as it is, or split into products of TF32 (`megasnn.kernels.split`); where few values of the input
are not 0, those with the input also as sums over these (`megasnn.kernels.sparse`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from megasnn.kernels.convolution import (
    Geometry,
    add_convolution,
    add_input_gradient,
    add_product,
    add_weight_gradient,
    convolve,
    input_gradient,
)
from megasnn.kernels.sparse.products import TYPES, has_loops
from megasnn.kernels.sparse.products import add_weight_gradient as add_sparse_weight_gradient
from megasnn.kernels.sparse.products import add_weight_gradient_of_bits as add_sparse_weight_gradient_of_bits
from megasnn.kernels.sparse.products import output as sparse_output
from megasnn.kernels.split import piece_pairs, split_product
from megasnn.kernels.tensor_cores import rounding_products
from megasnn.kernels.triton.available import usable_on

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
        at_once: those of them of which a kernel of our own forms all parts in one pass.
        sparse: whether products with an input of few spikes are sums over them.
    """

    exact: bool = False
    split: frozenset[Kind] = frozenset()
    at_once: frozenset[Kind] = field(default=frozenset(), kw_only=True)
    sparse: bool = field(default=False, kw_only=True)

    def can_at_once(self, kind: Kind, images: Tensor, weight: Tensor) -> bool:
        """Whether there is a kernel that forms this product in one pass. Args: images: the input, or the gradient of
        the output."""
        return False

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        if "output" in self.split:
            return split_product(self._output, x, weight, a_is_exact=True, add=self._add_output)
        return self._output(x, weight)

    def input_gradient(self, grad: Tensor, weight: Tensor, space: torch.Size) -> Tensor:
        """Args: grad: of the output. space: of the input, as `Geometry` knows it."""
        if "input gradient" in self.split:
            product = partial(self._input_gradient, space=space)
            return split_product(product, grad, weight, a_is_exact=False, add=self._add_input_gradient)
        return self._input_gradient(grad, weight, space)

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        """Adds it to `total`. Args: grad: of the output. x: the input."""
        if "weight gradient" not in self.split:
            self._add_weight_gradient(total, grad, x)
            return
        with rounding_products():
            for x_piece, grad_piece in piece_pairs(x, grad, a_is_exact=True):
                self._add_weight_gradient(total, grad_piece, x_piece)

    def add_weight_gradient_of_bits(self, total: Tensor, grad: Tensor, packed: Tensor, shape: torch.Size) -> bool:
        """The same of spikes of this shape that are packed (channels last); False, and nothing is done, where they are
        to be unpacked for it."""
        return False

    @abstractmethod
    def _output(self, x: Tensor, weight: Tensor) -> Tensor: ...

    @abstractmethod
    def _add_output(self, total: Tensor, x: Tensor, weight: Tensor) -> None: ...

    @abstractmethod
    def _input_gradient(self, grad: Tensor, weight: Tensor, space: torch.Size) -> Tensor: ...

    @abstractmethod
    def _add_input_gradient(self, total: Tensor, grad: Tensor, weight: Tensor) -> None: ...

    @abstractmethod
    def _add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor) -> None: ...


@dataclass(frozen=True)
class MatrixProducts(Products):
    """Of rows `[R, in]` and a weight `[out, in]`, which have no space."""

    def _output(self, x: Tensor, weight: Tensor) -> Tensor:
        y = sparse_output(_as_images(x), _as_images(weight), Geometry()) if self.sparse else None
        return x @ weight.t() if y is None else y.flatten(1)

    def _add_output(self, total: Tensor, x: Tensor, weight: Tensor) -> None:
        add_product(total, x, weight.t())

    def _input_gradient(self, grad: Tensor, weight: Tensor, space: torch.Size) -> Tensor:
        return grad @ weight

    def _add_input_gradient(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        add_product(total, grad, weight)

    def _add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        images = _as_images(total), _as_images(grad), _as_images(x)
        if not self.sparse or not add_sparse_weight_gradient(*images, Geometry()):
            add_product(total, grad.t(), x)


def _as_images(rows: Tensor) -> Tensor:
    """`[R, C]` as `[R, C, 1, 1]`, the same memory."""
    return rows[:, :, None, None]


@dataclass(frozen=True)
class ConvolutionProducts(Products):
    """Of images `[frames, C_in, H, W]` and a weight `[C_out, C_in / groups, k, k]`."""

    geometry: Geometry = Geometry()

    def can_at_once(self, kind: Kind, images: Tensor, weight: Tensor) -> bool:
        if kind == "weight gradient" or not usable_on(images.device):
            return False
        from megasnn.kernels.triton.split import takes

        return takes(images, weight, self.geometry, kind == "input gradient")

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        if "output" in self.at_once and self.can_at_once("output", x, weight):
            from megasnn.kernels.triton.split import split_convolution

            return split_convolution(x, weight, self.geometry, exact=True)
        return super().output(x, weight)

    def input_gradient(self, grad: Tensor, weight: Tensor, space: torch.Size) -> Tensor:
        if "input gradient" in self.at_once and self.can_at_once("input gradient", grad, weight):
            from megasnn.kernels.triton.split import split_input_gradient

            return split_input_gradient(grad, weight, self.geometry)
        return super().input_gradient(grad, weight, space)

    def add_weight_gradient_of_bits(self, total: Tensor, grad: Tensor, packed: Tensor, shape: torch.Size) -> bool:
        return self.sparse and add_sparse_weight_gradient_of_bits(total, grad, packed, shape, self.geometry)

    def _output(self, x: Tensor, weight: Tensor) -> Tensor:
        y = sparse_output(x, weight, self.geometry) if self.sparse else None
        return convolve(x, weight, self.geometry) if y is None else y

    def _add_output(self, total: Tensor, x: Tensor, weight: Tensor) -> None:
        add_convolution(total, x, weight, self.geometry)

    def _input_gradient(self, grad: Tensor, weight: Tensor, space: torch.Size) -> Tensor:
        return input_gradient(grad, weight, self.geometry, space)

    def _add_input_gradient(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        add_input_gradient(total, grad, weight, self.geometry)

    def _add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        if not self.sparse or not add_sparse_weight_gradient(total, grad, x, self.geometry):
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
        of_shape: the products of layers of a shape.
        told: for the log.
        sparse: whether products of all layers that take spikes or counts are sums over them.
    Attributes:
        shapes: of the layers that were built and whose products can be split, each once, in their order.
    """

    def __init__(
        self,
        everywhere: frozenset[Kind] = frozenset(),
        of_shape: dict[LayerShape, Products] | None = None,
        told: tuple[str, ...] = (),
        sparse: bool = False,
    ) -> None:
        self._everywhere, self._of_shape, self.told, self.sparse = everywhere, of_shape or {}, told, sparse
        self._asked: dict[LayerShape, None] = {}

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        return tuple(self._asked)

    def applied(self, products: Chosen, weight: torch.Size, frames: int, space: torch.Size) -> Chosen:
        """A layer's products, with those that are to be split. Args: as the fields of LayerShape."""
        plain = replace(products, split=frozenset(), at_once=frozenset(), sparse=products.exact and self.sparse)
        if not products.exact:
            return plain
        shape = LayerShape(plain, weight, frames, space)
        self._asked[shape] = None
        taken = self._of_shape.get(shape, replace(plain, split=self._everywhere))
        return replace(plain, split=taken.split, at_once=taken.at_once)


def products_on_cpu(may_be_sparse: bool, dtype: torch.dtype) -> ProductChoice:
    """Of layers that compute on a CPU, in a type. Args: may_be_sparse: whether sums over spikes are wanted."""
    if not may_be_sparse or dtype not in TYPES or not has_loops():
        return ProductChoice()
    return ProductChoice(
        sparse=True, told=("sparse products: weights are summed at spikes where that takes less time",)
    )
