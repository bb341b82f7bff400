"""Products of float32 out of products of TF32: pieces, errors against float64, and the choice between the two.

A CPU rounds no operands: the products of pieces are emulated there, and sums are rounded where tensor cores truncate.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megasnn.comm.codec import Content, fits_tensor_cores
from megasnn.kernels import compared_products
from megasnn.kernels.compared_products import ALLOWED_ERROR, Comparison, Measured, chosen, compare
from megasnn.kernels.convolution import Geometry
from megasnn.kernels.pooling import average_pool
from megasnn.kernels.products import KINDS, ConvolutionProducts, Kind, LayerShape, MatrixProducts, ProductChoice
from megasnn.kernels.split import piece_pairs, pieces, split_product
from megasnn.layers import BuildContext
from megasnn.models.building import describe
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.models.vgg_dvs.dimensions import VggDvs

DROPPED = (1 << 13) - 1  # bits of float32 that TF32 has not
MODELS = {
    "spikformer_cifar10": Spikformer(variant="spikformer_cifar10"),
    "spikformer_ti": Spikformer(variant="spikformer_ti"),
    "vgg_dvs": VggDvs(),
}


@cache
def shapes(model: str) -> tuple[LayerShape, ...]:
    """Of all layers of a model with weights."""
    choice = ProductChoice()
    describe(MODELS[model]).build(BuildContext(products=choice))
    return choice.shapes


def bits_of(values: Tensor) -> Tensor:
    return values.view(torch.int32)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_three_pieces_add_up_to_the_operand(bits: list[int]) -> None:
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    values = values[values.abs() < 3.4e38]  # finite, and not rounded to infinity
    three = pieces(values, 3)
    assert not any((bits_of(piece) & DROPPED).any() for piece in three)
    whole = values.double()
    missing = (whole - sum(piece.double() for piece in three)).abs()
    assert not missing[whole.abs() >= 2.0**-112].any() and bool((missing < 2.0**-136).all())
    large, small = pieces(values, 2)
    assert torch.equal(large, three[0]) and torch.equal(small, three[1])
    last_bit = 2.0**-23 * whole.abs() + 2.0**-136
    assert bool(((whole - large.double() - small.double()).abs() <= last_bit).all())


def test_pieces_have_the_memory_order_of_the_operand() -> None:
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert all(piece.is_contiguous(memory_format=torch.channels_last) for piece in pieces(images, 3))


def test_what_is_not_finite_stays_so() -> None:
    """The first is the NaN that GPUs make."""
    strange = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, -0x800000, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert not torch.isfinite(strange).any()
    for count in (2, 3):
        assert not torch.isfinite(sum(pieces(strange, count))).any()


@pytest.mark.parametrize("pool", [1, 2, 3, 4, 32, 64])
@pytest.mark.parametrize(
    "content, exact_after", [(Content.DENSE, ()), (Content.SPIKES, (1, 2, 4, 32)), (Content.COUNTS, (1, 2))]
)
def test_operands_lose_no_bits_on_tensor_cores(content: Content, exact_after: tuple[int, ...], pool: int) -> None:
    """Neither the input, where it is called exact, nor any piece."""
    images = torch.randn(2, 8, 64, 64, generator=torch.Generator().manual_seed(pool))
    if content is not Content.DENSE:
        largest = 1 if content is Content.SPIKES else 255
        images = (255 * images).abs().floor().clamp(max=largest)
        images[0] = largest
    exact = fits_tensor_cores(content, pool)
    assert exact == (pool in exact_after)
    seen = []

    def product(a: Tensor, b: Tensor) -> Tensor:
        seen.append(bool((bits_of(a) & DROPPED).any() or (bits_of(b) & DROPPED).any()))
        return torch.zeros(())

    split_product(product, average_pool(images, pool), torch.randn(8, 8, 1, 1), exact)
    assert seen == [False] * (2 if exact else 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_errors_are_those_of_fp32(model: str, kind: Kind) -> None:
    """Against float64, over the shapes of all layers; of a few frames, to save time."""
    assert len(shapes(model)) > 5
    with mock.patch.object(compared_products, "_seconds", return_value=0.0):
        for shape in shapes(model):
            found = compare(shape._replace(frames=min(shape.frames, 2)), kind, 1, torch.device("cpu"))
            assert found.split.largest <= 1.5 * found.plain.largest, (shape, found)
            assert found.split.mean <= 1.25 * found.plain.mean, (shape, found)


def test_a_single_product_of_rounded_operands_is_far_worse() -> None:
    """What makes the pieces necessary, and shows that the comparison would find it."""
    x, weight = (torch.rand(256, 1728) < 0.2).float(), torch.randn(64, 1728)
    exact = x.double() @ weight.double().t()
    (large,) = pieces(weight, 1)
    rounded = (x @ large.t() - exact).abs().mean()
    split = (split_product(lambda a, b: a @ b.t(), x, weight, True) - exact).abs().mean()
    assert rounded > 500 * split and split < (x @ weight.t() - exact).abs().mean()


@pytest.mark.parametrize("groups, stride", [(1, 1), (1, 2), (4, 1)])
def test_every_product_of_a_layer(groups: int, stride: int) -> None:
    """Split and as it is, the same but for rounding; a gradient is added to what is there."""
    geometry = Geometry((stride, stride), (1, 1), groups=groups)
    plain = ConvolutionProducts(True, geometry=geometry)
    split = ConvolutionProducts(True, frozenset(KINDS), geometry)
    generator = torch.Generator().manual_seed(groups)
    x, weight = torch.randn(4, 8, 9, 9, generator=generator), torch.randn(12, 8 // groups, 3, 3, generator=generator)
    x = (x > 0.5).float()
    y = plain.output(x, weight)
    grad, begun = torch.randn(y.shape, generator=generator), torch.randn(weight.shape, generator=generator)
    totals = [begun.clone(), begun.clone()]
    for products, total in zip((plain, split), totals, strict=True):
        products.add_weight_gradient(total, grad, x)
    torch.testing.assert_close(split.output(x, weight), y)
    torch.testing.assert_close(totals[1], totals[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        split.input_gradient(grad, weight, x.shape[2:]), plain.input_gradient(grad, weight, x.shape[2:])
    )


def comparison(error: float = 1.0, seconds: float = 0.5) -> Comparison:
    return Comparison(Measured(2e-6, 2e-7, 1.0), Measured(2e-6 * error, 2e-7 * error, seconds))


@pytest.mark.parametrize(
    "measured, expected",
    [
        (comparison(), True),
        (comparison(error=0.0), True),
        (comparison(error=ALLOWED_ERROR), True),
        (comparison(error=1.01 * ALLOWED_ERROR), False),
        (comparison(seconds=1.0), False),
        (comparison(error=float("nan")), False),
        (Comparison(Measured(2e-6, 2e-7, 1.0), Measured(2e-6, 4e-7, 0.5)), False),  # the mean alone
        (Comparison(Measured(2e-6, 2e-7, 1.0), Measured(4e-6, 2e-7, 0.5)), False),  # the largest alone
    ],
)
def test_split_where_it_is_as_exact_and_faster(measured: Comparison, expected: bool) -> None:
    first = LayerShape(MatrixProducts(True), torch.Size((4, 3)), 2, torch.Size())
    second = first._replace(weight=torch.Size((5, 3)))
    choice = chosen({(first, "output"): measured, (second, "output"): comparison(seconds=2.0)})
    products = choice.applied(MatrixProducts(True), *first[1:])
    assert products.split == ({"output"} if expected else set())
    assert choice.applied(MatrixProducts(True), *second[1:]).split == set()
    assert choice.applied(MatrixProducts(), *first[1:]).split == set()  # nobody has measured that
    assert choice.told[0].startswith(f"fp32 products: the output is split for tensor cores in {int(expected)} of 2 ")


@pytest.mark.parametrize(("error", "seconds", "taken"), [(1.0, 0.1, True), (1.0, 0.6, False), (9.0, 0.1, False)])
def test_a_kernel_of_its_own_where_that_is_faster_still(error: float, seconds: float, taken: bool) -> None:
    shape = LayerShape(ConvolutionProducts(True), torch.Size((4, 3, 3, 3)), 2, torch.Size((8, 8)))
    measured = replace(comparison(), at_once=Measured(2e-6 * error, 2e-7 * error, seconds))
    choice = chosen({(shape, "output"): measured})
    products = choice.applied(*shape)
    assert products.split == {"output"} and products.at_once == ({"output"} if taken else set())
    assert ("in 1 of them by a kernel" in choice.told[0]) == taken


def test_the_log_tells_the_gain() -> None:
    shape = LayerShape(MatrixProducts(True), torch.Size((4, 3)), 2, torch.Size())
    other = shape._replace(frames=3)
    of_shapes = {(shape, "output"): comparison(1.2, 0.25), (other, "output"): comparison(0.5, 0.5)}
    assert chosen(of_shapes).told[0].endswith("2.0 to 4.0 times as fast, with at most 1.20 times IEEE's mean error")


def test_pairs_come_smallest_first() -> None:
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    sizes = [(x.abs() * y.abs()).sum() for x, y in piece_pairs(a, b, False)]
    assert sizes[-1] > 100 * max(sizes[:-1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_on_tensor_cores(kind: Kind) -> None:
    """Far more exact than rounded operands; whether that is exact enough is measured by every run."""
    device = torch.device("cuda")
    for shape in shapes("spikformer_cifar10"):
        found = compare(shape, kind, 8, device)
        assert found.split.mean < 2e-5 and found.plain.mean < 2e-5, (shape, found)
        assert found.at_once is None or found.at_once.mean < 2e-5, (shape, found)
