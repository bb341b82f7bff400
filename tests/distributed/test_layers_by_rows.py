"""Layers on images whose rows ranks share out, against one rank with whole images, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from megasnn.kernels import NeuronSpec
from megasnn.layers import (
    BuildContext,
    ConvNormNeuron,
    KeyedLayer,
    MaxPool,
    MeanLinear,
    NeuronConvNorm,
    ParallelConv,
    ParallelDropout,
    ParallelLinear,
    PooledUnit,
    SpikeDrivenAttention,
    SpikingSelfAttention,
    TokenAttention,
    WholeImages,
)
from megasnn.layers.context import building
from megasnn.layers.holding import Holding, exchanges_of, hold
from megasnn.parallel.sharding import materialise, own_rows
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import Group
from tests.distributed.test_conv import CASES as CONVOLUTIONS
from tests.distributed.test_conv import Case as Convolution
from tests.distributed.whole import channels_last, everybody, fill_mantissas, random, spikes

T, N, C = 2, 3, 8
CLOSE = dict(rtol=1e-9, atol=1e-11)


class Flattened(nn.Module):
    """A linear layer over whole images."""

    def __init__(self, height: int) -> None:
        super().__init__()
        self.whole, self.linear = WholeImages(), ParallelLinear(C * height * 5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.whole.used(self.whole(x)).flatten(2))


@dataclass(frozen=True)
class Case:
    """A layer and what it is given.

    Attributes:
        shape: of the input, `[C, H, W]` or `[C, L]`. holds_spikes: whether it is spikes.
        is_alike: whether every rank has the whole output.
        is_striped: whether all rows are equal, so that windows one below the other see the same.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    holds_spikes: bool = True
    is_alike: bool = False
    is_striped: bool = False

    def input(self) -> Tensor:
        x = (spikes if self.holds_spikes else random)(T, N, *self.shape, seed=3)
        return x[..., :1, :].expand_as(x) if self.is_striped else x


def images(make: Callable[[], nn.Module], *heights: int, **options: bool) -> list[Case]:
    return [Case(make, (C, height, 5), **options) for height in heights]


def convolution(case: Convolution) -> nn.Module:
    return ParallelConv(case.inputs, case.outputs, case.kernel, **dict(case.options))


def has_rows(case: Convolution) -> bool:
    """Whether each of three ranks has a row of the output."""
    return convolution(case)(case.input(0).to("meta")).shape[3] >= 3


PLIF, SOFT = NeuronSpec("plif", surrogate="atan"), NeuronSpec("lif", v_reset=None)
CASES: dict[str, list[Case]] = {
    "wide": images(lambda: ParallelConv(C, C, 7, padding=3), 3, 8),
    "dilated": images(lambda: ParallelConv(C, C, 3, padding=4, dilation=4, padding_mode="circular"), 9),
    "dilated, zeros": images(lambda: ParallelConv(C, C, 5, padding=4, dilation=2), 12, 13),
    "groups": images(lambda: ParallelConv(C, C, 3, padding=1, groups=4, bias=True), 6, 7),
    "pooled, stride 1": images(lambda: ParallelConv(C, C, 5, pool=2, padding=2), 12, 13, 8),
    "pooled first": images(lambda: ParallelConv(C, C, 3, pool=2, padding=1, stride=2), 12, 13),
    "strided pointwise": images(lambda: ParallelConv(C, C, 1, stride=2), 7, 8, holds_spikes=False),
    "unit": images(lambda: ConvNormNeuron(C, C, 3, bias=True, neuron=PLIF), 4, 7),
    "unit, max pooling": images(lambda: ConvNormNeuron(C, C, 3, max_pool=True), 5, 7, 8),
    "unit, both poolings": images(lambda: ConvNormNeuron(C, C, 3, max_pool=True, average_pool=2), 11, 14),
    "unit, stride and max pooling": images(
        lambda: ConvNormNeuron(C, C, 7, stride=2, max_pool=True, neuron=SOFT), 11, 14, holds_spikes=False
    ),
    "unit, max pooling of equal values": [
        Case(partial(ConvNormNeuron, 16, C, size, max_pool=True), (16, height, 12), is_striped=True)
        for size, height in ((3, 12), (3, 15), (5, 16))
    ],
    "unit, another norm": images(lambda: ConvNormNeuron(C, C, 3, max_pool=True, norm=nn.Identity()), 7),
    "pooled unit": images(lambda: PooledUnit(C, C, 3), 5, 8),
    "neurons first": images(lambda: NeuronConvNorm(C, C, 3), 7, holds_spikes=False),
    "max pooling": images(MaxPool, 5, 8, holds_spikes=False),
    "attention": images(lambda: SpikingSelfAttention(C, 2, v_threshold=0.1), 4, 7),
    "attention of many tokens": images(lambda: SpikingSelfAttention(C, 2, v_threshold=0.1), 60),
    "token attention": images(lambda: TokenAttention(C, 2), 7),
    "spike-driven attention": images(lambda: SpikeDrivenAttention(C), 7, holds_spikes=False),
    "mean": images(lambda: MeanLinear(C, 4), 3, 7, is_alike=True),
    "flattened": images(lambda: Flattened(7), 7, is_alike=True),
    "dropout": images(lambda: ParallelDropout(0.5, "dropout"), 7),
    "convolution": [
        Case(partial(convolution, each), tuple(each.input(0).shape[2:]), holds_spikes=False)
        for each in CONVOLUTIONS
        if has_rows(each)
    ],
}
"""Of heights that ranks share evenly and unevenly, down to a row each."""


def computed(case: Case, context: BuildContext) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of all parameters, as far as this rank has them."""
    group, x = context.context, case.input()
    with building(context):
        layer = case.make()
    keys = (range(N),) if isinstance(layer, KeyedLayer) else ()
    with torch.no_grad(), Holding():
        meta = torch.empty_like(x, device="meta")
        shape = layer(hold(meta, 1) if case.holds_spikes else meta, *keys).shape
    materialise([("layer", layer)], torch.device("cpu"), seed=1)
    fill_mantissas(layer)
    own = own_rows(x.shape[3], group.size, group.rank)
    x = channels_last(x[:, :, :, own.start : own.stop]).requires_grad_()
    weights = random(*shape, seed=4)
    statistics.reset()
    with statistics.counting():
        y = layer(x, *keys)
    if case.is_alike:
        weights = weights * (group.rank == 0)
    else:
        out = own_rows(shape[3], group.size, group.rank)
        weights = weights[:, :, :, out.start : out.stop]
    with statistics.counting():
        (y * weights).sum().backward()
    assert statistics.total("context").calls == sum(exchanges_of([layer]))
    gradients = {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}
    return {"y": y.detach(), "x": x.grad, **gradients}


def _run(name: str, backend: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """What one rank computes, and this rank's share of it."""
    one = BuildContext(dtype=torch.float64, compute_dtype=torch.float64, neuron_backend=backend)
    shared = BuildContext(**{**vars(one), "context": everybody("context"), "cut": "rows"})
    return [(computed(case, one), computed(case, shared)) for case in CASES[name]]


def require_equal(ranks, size: int, name: str, backend: str) -> None:
    found = ranks(size, _run, name, backend)
    for number, case in enumerate(CASES[name]):
        whole, shares = found[0][number][0], [each[number][1] for each in found]
        about = f"{name}, {case.shape}, case {number}: "
        for key, value in whole.items():
            if key == "y" and case.is_alike:
                ours = shares[0][key]
                assert all(torch.equal(each[key], ours) for each in shares), about
            elif key in ("x", "y"):
                ours = torch.cat([each[key] for each in shares], 3)
            else:
                ours = sum(each[key] for each in shares)
            torch.testing.assert_close(ours, value, **CLOSE, msg=lambda text, key=key, about=about: about + key + text)
        assert whole["x"].abs().max() > 0, about


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # of torch's own
@pytest.mark.parametrize("name", CASES)
def test_rows_of_what_one_rank_computes(ranks, name: str) -> None:
    for size in (2, 3):
        require_equal(ranks, size, name, "torch")


@pytest.mark.parametrize(
    "name", ["unit, max pooling", "unit, max pooling of equal values", "unit, both poolings", "pooled unit"]
)
def test_fused_units(ranks, name: str) -> None:
    require_equal(ranks, 3, name, "fused")


@pytest.mark.parametrize(
    ("make", "height", "most"),
    [
        (lambda: ParallelConv(C, C, 3), 4, 2),
        (lambda: ConvNormNeuron(C, C, 3, max_pool=True), 4, 2),
        (lambda: ParallelConv(C, C, 1), 2, 2),
        (MaxPool, 3, 2),
        (WholeImages, 1, 1),
    ],
)
def test_fewer_rows_than_ranks_are_refused(make: Callable[[], nn.Module], height: int, most: int) -> None:
    """In the dry run, and with what would do."""
    with building(BuildContext(context=Group("context", (0, 1, 2), 0), cut="rows")):
        layer = make()
    with pytest.raises(
        ValueError, match=rf"{most} row\(s\) for 3 ranks: .*--context-parallel-size may be {most} at most"
    ):
        layer(torch.empty(T, N, C, height, 5, device="meta"))


def test_more_tokens_than_sums_of_two_bytes_count_are_refused() -> None:
    """In the dry run."""
    with building(BuildContext(context=Group("context", (0, 1), 0), cut="rows")):
        layer = SpikingSelfAttention(C, 2)
    with torch.no_grad(), pytest.raises(ValueError, match="sums of up to 40000 do not fit into the two bytes"):
        layer(torch.empty(T, N, C, 200, 200, device="meta"))
