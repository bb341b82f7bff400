"""Gradients of convolutions and pooling are those of torch, by whichever operation they are computed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor

from megasnn.kernels import convolution
from megasnn.kernels.convolution import (
    FEW_SUMMED_ROWS,
    Geometry,
    add_weight_gradient,
    average_pool_gradient,
    convolution_input_gradient,
    mean_of_windows,
    spread_over_windows,
)


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
            for found in (
                convolution._transposed(grad, weight, geometry, space),
                convolution_input_gradient(grad, weight, geometry, space),
            ):
                torch.testing.assert_close(found, x.grad, rtol=1e-12, atol=1e-12)
            assert convolution_input_gradient(grad.to("meta"), weight.to("meta"), geometry, space).shape == x.shape


@pytest.mark.parametrize("rows", [FEW_SUMMED_ROWS - 16, FEW_SUMMED_ROWS])
def test_the_gradient_of_a_pointwise_weight_is_added(rows: int) -> None:
    """Over few rows by a product of matrices, over more by a convolution."""
    x, weight = random(16, 4, 1, rows // 16), random(6, 4, 1, 1).requires_grad_()
    y = torch.conv2d(x, weight)
    grad, total = random(*y.shape), torch.ones_like(weight)
    y.backward(grad)
    add_weight_gradient(total, grad, x, Geometry())
    torch.testing.assert_close(total - 1, weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [(2, 2), (3, 1)])
def test_a_narrow_pointwise_weight_gradient_has_no_stride(stride: tuple[int, int], groups: int) -> None:
    """oneDNN's own is wrong or ends the process for some sizes in float32; in float64, as here, it is not used."""
    x = random(16, 4, 9, 20)
    weight = random(6, 4 // groups, 1, 1).requires_grad_()
    y = torch.conv2d(x, weight, None, stride, groups=groups)
    grad = random(*y.shape)
    total = torch.zeros_like(weight)
    y.backward(grad)
    with mock.patch.object(convolution, "_convolution_backward", wraps=convolution._convolution_backward) as backward:
        add_weight_gradient(total, grad, x, Geometry(stride, groups=groups))
    torch.testing.assert_close(total, weight.grad, rtol=1e-12, atol=1e-12)
    assert all(call.args[3].stride == (1, 1) for call in backward.call_args_list)
    assert backward.called == (groups > 1)  # without groups it is a product of matrices


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """torch fills memory that it has not written with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("space", "stride"), [((1, 1), (2, 2)), ((4, 1), (1, 2)), ((2, 2), (3, 3)), ((2, 1), (3, 3))])
def test_a_bfloat16_weight_gradient_of_images_narrower_than_the_stride_is_whole(
    space: tuple[int, int], stride: tuple[int, int], groups: int
) -> None:
    """oneDNN's own has unwritten values. Without AVX-512 it has none, and this test cannot fail."""
    x = random(4, 16, *space).bfloat16()
    weight = random(32, 16 // groups, 3, 3).requires_grad_()
    y = torch.conv2d(x.double(), weight, None, stride, 1, groups=groups)
    grad = random(*y.shape).bfloat16()
    y.backward(grad.double())
    for _ in range(10):
        total = torch.zeros_like(weight, dtype=torch.float32)
        add_weight_gradient(total, grad, x, Geometry(stride, (1, 1), groups=groups))
        torch.testing.assert_close(total.double(), weight.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("window", [2, 3])
def test_pooling_and_its_gradient(window: int) -> None:
    """On the CPU, and by the views that a GPU takes."""
    space = torch.Size((8, 9))
    x = random(2, 4, *space).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = torch.nn.functional.avg_pool2d(x, window)
    grad = random(*y.shape)
    y.backward(grad)
    found = average_pool_gradient(grad, window, space)
    assert torch.equal(found, x.grad) and found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(mean_of_windows(x, window), y, rtol=1e-15, atol=0)
    assert mean_of_windows(x, window).stride() == y.stride()
    again = spread_over_windows(grad, window, torch.full_like(x, torch.nan))
    torch.testing.assert_close(again, x.grad, rtol=1e-15, atol=0)
