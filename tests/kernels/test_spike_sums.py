"""Sums over spikes on a CPU: against dense products, and where they are formed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megasnn.config import TrainingConfig
from megasnn.engine import Engine
from megasnn.kernels import products
from megasnn.kernels.convolution import Geometry, add_weight_gradient, convolve
from megasnn.kernels.numba.spike_sums import Work, spikes_in
from megasnn.kernels.products import Products
from megasnn.kernels.spike_codec import TERNARY, pack_bits, pack_ternary, remember_bits
from megasnn.models.build import describe_model
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer
from megasnn.planner import analyze
from megasnn.planner.analyze import counted_sizes
from tests.kernels.models import torch_threads
from tests.sums import MOST, worth_by_time

SPARSE = Products(sparse=True)
MODEL = Spikformer(embed_dim=32, depth=1, num_heads=2, image_size=8, in_channels=1, time_steps=2)
SIZES = {"micro_batch_size": 5, "global_batch_size": 10, "train_iters": 3}


def images(shape: tuple[int, int, int, int], share: float, dtype: torch.dtype = torch.float64, most: int = 1) -> Tensor:
    """Values 0 to `most`, channels last, so many of them not 0."""
    frames, channels, height, width = shape
    values = torch.randint(1, most + 1, (frames, height, width, channels))
    return (values * (torch.rand(frames, height, width, channels) < share)).to(dtype).movedim(-1, 1)


def kernel(out: int, channels: int, sides: tuple[int, int], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(out, channels, *sides, dtype=dtype).contiguous(memory_format=torch.channels_last)


def gradient(sparse: Products, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    """Added to ones, so that it is seen to be added."""
    total = torch.ones_like(weight)
    sparse.add_weight_gradient(total, grad, x)
    return total - 1


class Counted:
    """How many products were sums over spikes."""

    outputs = gradients = 0


@contextmanager
def counted() -> Iterator[Counted]:
    found = Counted()
    output = products.sparse_output

    def counted_output(*arguments: Any) -> Tensor | None:
        y = output(*arguments)
        found.outputs += y is not None
        return y

    def counted_add(adds: Callable[..., bool]) -> Callable[..., bool]:
        def add(*arguments: Any) -> bool:
            was_added = adds(*arguments)
            found.gradients += was_added
            return was_added

        return add

    names = "add_sparse_weight_gradient", "add_sparse_weight_gradient_of_bits"
    patches = {name: counted_add(getattr(products, name)) for name in names}
    with mock.patch.multiple(products, sparse_output=counted_output, **patches):
        yield found


@st.composite
def geometries(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int], Geometry]:
    """Height and width of the input, those of the kernel, and stride, padding and dilation that leave an output."""
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    sides, step, pads, far = draw(pair), draw(pair), draw(st.tuples(st.integers(0, 2), st.integers(0, 2))), draw(pair)
    least = [reach * (side - 1) + 1 for reach, side in zip(far, sides, strict=True)]
    space = draw(st.tuples(st.integers(least[0], 9), st.integers(least[1], 9)))
    return space, sides, Geometry(draw(st.sampled_from([(1, 1), step])), pads, far)


@settings(deadline=None, max_examples=60)
@given(
    geometries(),
    st.integers(1, 3),
    st.integers(1, 11),
    st.sampled_from([8, 16, 24, 40, 96, 200, 408]),
    st.sampled_from([0.0, 0.05, MOST - 0.15]),
    st.sampled_from([1, 5]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 2**31),
)
def test_any_convolution(sizes, frames, eights, out, share, most, dtype, seed) -> None:
    torch.manual_seed(seed)
    space, sides, geometry = sizes
    x, weight = images((frames, 8 * eights, *space), share, dtype, most), kernel(out, 8 * eights, sides, dtype)
    sparse = replace(SPARSE, geometry=geometry)
    with counted() as found:
        y = sparse.convolve(x, weight)
        expected = convolve(x.double(), weight.double(), geometry)
        grad = torch.randn_like(y)
        gradients = gradient(sparse, x, weight, grad)
    of_weight = torch.zeros_like(weight, dtype=torch.float64)
    add_weight_gradient(of_weight, grad.double(), x.double(), geometry)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-4
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradients.double(), of_weight, rtol=tolerance, atol=tolerance)
    assert y.dtype == dtype and y.movedim(1, -1).is_contiguous()
    if float((x != 0).float().mean()) < MOST:
        assert found.outputs == 1 and found.gradients == (geometry.stride == (1, 1))


def test_terms_are_added_in_their_order() -> None:
    """Those of the dense sum, by row, column and channel of the kernel: so where a library adds in this order too, not
    a bit differs."""
    torch.manual_seed(0)
    x, weight = images((2, 16, 5, 6), 0.3, torch.float32), kernel(24, 16, (3, 3), torch.float32)
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1))
    expected = torch.zeros(2, 24, 5, 6)
    for row in range(3):
        for column in range(3):
            for channel in range(16):
                seen = padded[:, channel, None, row : row + 5, column : column + 6]
                expected += seen * weight[:, channel, row, column, None, None]
    y = replace(SPARSE, geometry=Geometry(padding=(1, 1))).convolve(x, weight)
    assert torch.equal(y, expected) and (expected != 0).any()


@pytest.mark.parametrize("share", [0.05, 0.2])
@pytest.mark.parametrize("sides, padding", [((1, 1), (0, 0)), ((3, 3), (1, 1))])
def test_threads_change_no_bit(sides: tuple[int, int], padding: tuple[int, int], share: float) -> None:
    torch.manual_seed(0)
    x, weight = images((5, 40, 9, 7), share, torch.float32, 3), kernel(200, 40, sides, torch.float32)
    sparse, grad = replace(SPARSE, geometry=Geometry(padding=padding)), torch.randn(5, 200, 9, 7)
    found = []
    for threads in (1, 2, 3):
        with torch_threads(threads), counted() as used:
            found.append((sparse.convolve(x, weight), gradient(sparse, x, weight, grad)))
        assert (used.outputs, used.gradients) == (1, 1)
    assert all(torch.equal(a, b) for each in found[1:] for a, b in zip(each, found[0], strict=True))


def test_packed_spikes_are_not_unpacked() -> None:
    torch.manual_seed(0)
    x, grad = images((3, 24, 6, 5), 0.2, torch.float32), torch.randn(3, 16, 4, 3)
    packed = pack_bits(x)
    total, expected = torch.ones(2, 16, 24, 3, 3).unbind()
    assert SPARSE.add_weight_gradient_of_bits(total, grad, packed, x.shape)
    SPARSE.add_weight_gradient(expected, grad, x)
    assert torch.equal(total, expected) and not torch.equal(total, torch.ones_like(total))
    with mock.patch("megasnn.kernels.numba.spike_sums.pack_where_not_zero") as packs:
        spikes = spikes_in(remember_bits(x, packed))
    assert spikes is not None and not packs.called and not spikes.values.size


def test_packed_ternary_spikes_say_where_they_are() -> None:
    """Their values are read where sums are formed, from the tensor."""
    torch.manual_seed(0)
    weight, grad = kernel(16, 24, (1, 1), torch.float32), torch.randn(3, 16, 6, 5)
    x = images((3, 24, 6, 5), 0.2, torch.float32) * (1 - 2 * images((3, 24, 6, 5), 0.5, torch.float32)) + 0.0
    assert sorted(x.unique().tolist()) == [-1, 0, 1]
    remember_bits(x, pack_ternary(x, check=True), TERNARY)
    with mock.patch("megasnn.kernels.numba.spike_sums.pack_where_not_zero") as packs, counted() as found:
        y, of_weight = SPARSE.convolve(x, weight), gradient(SPARSE, x, weight, grad)
    assert not packs.called and (found.outputs, found.gradients) == (1, 1)
    torch.testing.assert_close(y, convolve(x, weight, Geometry()), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of_weight, gradient(Products(), x, weight, grad), rtol=1e-4, atol=1e-4)


def test_a_product_of_rows() -> None:
    torch.manual_seed(0)
    x, weight, grad = images((30, 32, 1, 1), 0.2, most=4), kernel(16, 32, (1, 1)), kernel(30, 16, (1, 1))
    rows, of_rows, matrix = x.flatten(1), grad.flatten(1), weight.flatten(1)
    for sparse in (True, False):
        product = Products(sparse)
        with counted() as found:
            y, of_weight = product.convolve(x, weight).flatten(1), gradient(product, x, weight, grad).flatten(1)
        torch.testing.assert_close(y, rows @ matrix.t(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_weight, of_rows.t() @ rows, rtol=1e-12, atol=1e-12)
        assert (found.outputs, found.gradients) == (sparse, sparse)


@pytest.mark.parametrize(
    "x, out, geometry",
    [
        (images((2, 16, 4, 4), 0.6), 16, Geometry()),
        (images((2, 12, 4, 4), 0.2), 16, Geometry()),
        (images((2, 16, 4, 4), 0.2), 12, Geometry()),
        (images((2, 16, 4, 4), 0.2), 16, Geometry(groups=2)),
        (images((2, 16, 4, 4), 0.2, torch.bfloat16), 16, Geometry()),
        (images((2, 16, 4, 4), 0.2).contiguous(), 16, Geometry()),
    ],
    ids=["too many", "channels", "output channels", "groups", "bfloat16", "channels first"],
)
def test_where_products_stay_dense(x: Tensor, out: int, geometry: Geometry) -> None:
    weight = kernel(out, x.shape[1] // geometry.groups, (1, 1), x.dtype)
    sparse = replace(SPARSE, geometry=geometry)
    with counted() as found:
        y = sparse.convolve(x, weight)
        gradients = gradient(sparse, x, weight, torch.ones_like(y))
    dense = replace(sparse, sparse=False)
    assert torch.equal(y, dense.convolve(x, weight)) and (found.outputs, found.gradients) == (0, 0)
    assert torch.equal(gradients, gradient(dense, x, weight, torch.ones_like(y)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen_without_spikes(value: float) -> None:
    x, weight = images((2, 16, 4, 4), 0.0), kernel(16, 16, (1, 1))
    weight[3, 5] = value
    assert SPARSE.convolve(x, weight).isnan().sum() == 2 * 4 * 4
    for share in (0.0, 0.3):
        x, grad = images((2, 16, 4, 4), share), torch.randn(2, 24, 4, 4, dtype=torch.float64)
        x[:, :, 2, 1], grad[1, 5, 2, 1] = 0, value
        found = gradient(SPARSE, x, kernel(24, 16, (1, 1)), grad)
        assert found[5].isnan().all() and found.isfinite().sum() == 23 * 16


def test_operands_that_do_not_fit_are_refused_as_by_dense_products() -> None:
    x, grad, weight = images((2, 16, 4, 4), 0.2), torch.randn(2, 24, 4, 4, dtype=torch.float64), kernel(24, 16, (1, 1))
    for wrong in (kernel(24, 8, (1, 1)), kernel(24, 24, (1, 1)), weight.float(), kernel(24, 16, (5, 5))):
        with pytest.raises(RuntimeError):
            SPARSE.convolve(x, wrong)
    for wrong in (grad[:1], grad[:, :16], grad[:, :, :3], grad.float()):
        with pytest.raises(RuntimeError):
            SPARSE.add_weight_gradient(torch.zeros_like(weight), wrong, x)
    assert SPARSE.convolve(x, weight[:0]).shape == (2, 0, 4, 4)


def test_where_sums_take_less_time() -> None:
    """By the rule: on long rows, many pixels and few threads, with few spikes; in its terms of one layer each."""
    usual = Work(pixels=8192, channels=384, columns=384, places=9, itemsize=4)
    assert worth_by_time(usual, 0.3) and not worth_by_time(usual, 0.45)
    assert worth_by_time(usual, 0.05, threads=4) and not worth_by_time(usual, 0.3, threads=8)
    for fewer in ({"columns": 32}, {"pixels": 64}, {"channels": 8, "columns": 64}):
        assert not worth_by_time(replace(usual, **fewer), 0.3)
    assert not worth_by_time(Work(2048, 384, 48, 1, 4), 0.0)


@pytest.mark.parametrize("precision, tolerance", [("fp64", 1e-12), ("fp32", 1e-5)])
def test_a_model_computes_the_same(precision: str, tolerance: float) -> None:
    losses = {}
    for flag in ("auto", "off"):
        with counted() as found, Engine(MODEL, **SIZES, precision=precision, sparse_products=flag) as engine:
            torch.manual_seed(0)
            steps = [engine.train_step(torch.rand(10, 1, 8, 8), torch.arange(10)).loss for _ in range(3)]
            losses[flag] = torch.tensor(steps, dtype=torch.float64)
        used = min(found.outputs, found.gradients)
        assert used > 10 if flag == "auto" else used == 0
    torch.testing.assert_close(losses["auto"], losses["off"], rtol=tolerance, atol=0)


@pytest.mark.parametrize(("precision", "sparse"), [("fp32", True), ("bf16", False)])
def test_the_planner_measures_what_a_run_computes(precision: str, sparse: bool) -> None:
    config = run_config(Spikformer)(model=MODEL, training=TrainingConfig(**SIZES, precision=precision))
    with Engine(MODEL, **SIZES, precision=precision) as engine:
        assert engine.distributed.context.numerics.sparse_products == sparse
    description = describe_model(config.model, config.neuron.spec)
    with (
        mock.patch.object(analyze, "count_memory", wraps=analyze.count_memory) as sized,
        mock.patch.object(analyze, "profile_layers", wraps=analyze.profile_layers) as timed,
    ):
        analyze.measured(description, config, counted_sizes(description, config, on_cpu=True))
    contexts = [call.args[2] for call in (*sized.call_args_list, *timed.call_args_list)]
    assert len(contexts) > 1 and {each.numerics.sparse_products for each in contexts} == {sparse}
