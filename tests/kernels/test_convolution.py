"""Gradients of convolutions and pooling: no memory for a tensor of which only the shape matters, none for a sum that
has its place already."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megasnn.kernels import convolution
from megasnn.kernels.convolution import (
    FEW_SUMMED_ROWS,
    Geometry,
    add_weight_gradient,
    average_pool_gradient,
    input_gradient,
)


class Called(TorchDispatchMode):
    """Notes the operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def random(*shape: int) -> Tensor:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)
    return tensor.contiguous(memory_format=torch.channels_last)


def test_a_gpus_input_gradient_is_that_of_torch() -> None:
    for k, stride, padding, dilation in product((1, 3), (1, 2, 3), (0, 1), (1, 2)):
        geometry, weight = Geometry((stride, 1), (padding, 0), (dilation, dilation)), random(6, 4, k, k)
        for space in (torch.Size((9, 8)), torch.Size((10, 7))):
            x = random(2, 4, *space).requires_grad_()
            y = torch.conv2d(x, weight, None, geometry.stride, geometry.padding, geometry.dilation)
            grad = random(*y.shape)
            y.backward(grad)
            found = convolution._transposed(grad, weight, geometry, space)
            torch.testing.assert_close(found, x.grad, rtol=1e-12, atol=1e-12)
            with Called() as called:
                on_gpu = input_gradient(grad.to("meta"), weight.to("meta"), geometry, space)
            assert on_gpu.shape == x.shape and not [name for name in called.names if "empty" in name]


@pytest.mark.parametrize("fewer", [0, 1])
def test_the_gradient_of_a_pointwise_weight_is_added_in_place_over_few_rows(fewer: int) -> None:
    """By one product; over more rows by a convolution, whose result is added. Both are what torch gives."""
    x, weight = random(16, 4, 1, FEW_SUMMED_ROWS // 16 - fewer), random(6, 4, 1, 1).requires_grad_()
    y = torch.conv2d(x, weight)
    grad, total = random(*y.shape), torch.ones_like(weight)
    y.backward(grad)
    with Called() as called:
        add_weight_gradient(total, grad, x, Geometry())
    torch.testing.assert_close(total - 1, weight.grad, rtol=1e-12, atol=1e-12)
    assert ("aten.convolution_backward.default" not in called.names) == bool(fewer)
    assert ("aten.addmm_.default" in called.names) == bool(fewer)


@pytest.mark.parametrize("window", [2, 3])
def test_the_gradient_of_pooling_stands_for_the_input(window: int) -> None:
    space = torch.Size((8, 9))
    x = random(2, 4, *space).requires_grad_()
    y = torch.nn.functional.avg_pool2d(x, window)
    grad = random(*y.shape)
    y.backward(grad)
    with Called() as called:
        found = average_pool_gradient(grad, window, space)
    assert called.names == ["aten.empty.memory_format", "aten.avg_pool2d_backward.grad_input"]
    assert torch.equal(found, x.grad) and found.is_contiguous(memory_format=torch.channels_last)
