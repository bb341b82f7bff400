"""Which products of float32 may round to TF32 on a GPU, at the time when each is started: those of pieces alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megasnn.kernels.convolution import Geometry
from megasnn.kernels.products import KINDS, ConvolutionProducts, Kind, MatrixProducts, Products
from megasnn.kernels.tensor_cores import CUBLAS, CUDNN, OPERATIONS, let_products_round

DROPPED = (1 << 13) - 1  # bits of float32 that TF32 has not
OPERANDS = {"mm": (0, 1), "addmm_": (1, 2), "convolution": (0, 1)}


class Started(NamedTuple):
    """How a product may round, by all settings that torch has for it, and whether its operands are exact in TF32."""

    settings: set[Any]
    exact: bool


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.started: list[Started] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "convolution_backward":
            wants_input, wants_weight, _ = args[-1]
            assert wants_input != wants_weight
            self._note(args[0], args[2] if wants_input else args[1])
        elif name in OPERANDS:
            self._note(*(args[index] for index in OPERANDS[name]))
        return func(*args, **(kwargs or {}))

    def _note(self, *operands: Tensor) -> None:
        settings = {each.fp32_precision for each in OPERATIONS} | {CUDNN.allow_tf32, CUBLAS.allow_tf32}
        exact = not any((each.contiguous().view(torch.int32) & DROPPED).any() for each in operands)
        self.started.append(Started(settings, exact))


@pytest.fixture(autouse=True)
def ieee() -> Iterator[None]:
    """As `--precision fp32` tells torch."""
    before = CUBLAS.fp32_precision
    let_products_round(False)
    yield
    assert all(each.fp32_precision == "ieee" for each in OPERATIONS)
    let_products_round(True)
    CUBLAS.fp32_precision = before


def _form(products: Products, kind: Kind) -> list[Started]:
    generator = torch.Generator().manual_seed(0)
    space = () if isinstance(products, MatrixProducts) else (8, 8)
    weight = torch.randn(6, 4, *(3 for _ in space), generator=generator)
    x = (torch.rand(32, 4, *space, generator=generator) < 0.4).float()
    grad = torch.randn(32, 6, *space, generator=generator)
    with _Products() as noted:
        if kind == "output":
            products.output(x, weight)
        elif kind == "input gradient":
            products.input_gradient(grad, weight, x.shape[2:])
        else:
            products.add_weight_gradient(torch.zeros_like(weight), grad, x)
    return noted.started


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plain", [MatrixProducts(True), ConvolutionProducts(True, geometry=Geometry(padding=(1, 1)))])
def test_pieces_round_and_nothing_else(plain: Products, kind: Kind) -> None:
    """Pieces have no bit that is dropped, and enter TF32; what has more bits is multiplied as IEEE says."""
    (ieee,) = _form(plain, kind)
    assert ieee == Started({"ieee", False}, exact=False)
    others = replace(plain, split=frozenset(KINDS) - {kind})
    assert _form(others, kind) == [ieee]
    split = _form(replace(plain, split=frozenset({kind})), kind)
    assert split == [Started({"tf32", True}, exact=True)] * (3 if kind == "input gradient" else 2)
