"""Images whose rows ranks share out: rows and gradients arrive, and layers compute what one rank does, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megasnn.common.grid import Grid
from megasnn.kernels import NeuronSpec
from megasnn.kernels.spike_codec import Content
from megasnn.layers import (
    BuildContext,
    ConvNormNeuron,
    MaxPool,
    MeanLinear,
    NeuronConvNorm,
    Numerics,
    ParallelConv,
    ParallelDropout,
    ParallelLinear,
    SpikeDrivenAttention,
    SpikingSelfAttention,
    TokenAttention,
    WholeImages,
    apply_layer,
)
from megasnn.layers.context import building
from megasnn.layers.row_context import RowMove, divide_rows, move_rows
from megasnn.layers.shape_inference import BoundsInference, mark_spikes
from megasnn.layers.tensors import materialise
from megasnn.parallel.sharding import own_span
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import ParallelState
from tests.distributed.test_conv import CASES as CONVOLUTIONS
from tests.distributed.test_conv import Case as Convolution
from tests.distributed.whole import channels_last, everybody, fill_mantissas, random, spikes, state_of

T, N, C = 2, 3, 8
CLOSE = dict(rtol=1e-9, atol=1e-11)
HEIGHT, WIDTH = 9, 3
HEIGHTS = (9, 8, 9, 9)  # of which rows move, for each content
MOVES = {
    "halo": (range(-1, 4), range(2, 7), range(5, 10)),
    "far": (range(7, 12), range(-2, 1), range(2, 8)),
    "everything": (range(HEIGHT),) * 3,
    "nothing on one": (range(1), range(3, 3), range(3, 7)),
}


@given(height=st.integers(1, 40), ranks=st.integers(1, 9))
def test_rows_are_shared_evenly(height, ranks) -> None:
    if height < ranks:
        with pytest.raises(ValueError, match=f"may be {height} at most"):
            divide_rows(height, ranks)
        return
    local_rows = divide_rows(height, ranks)
    assert [row for rows in local_rows for row in rows] == list(range(height))
    assert max(map(len, local_rows)) - min(map(len, local_rows)) <= 1


def _moved(needed: tuple[range, ...], height: int, content: Content) -> tuple:
    group = everybody("cp")
    move = RowMove(divide_rows(HEIGHT, group.size), needed, height)
    shape = (2, 3, C, HEIGHT, WIDTH)
    images = {
        Content.DENSE: random(*shape, seed=1),
        Content.SPIKES: spikes(*shape, seed=1),
        Content.TERNARY: spikes(*shape, seed=1) - spikes(*shape, seed=2),
        Content.COUNTS: (random(*shape, seed=1) * 20).abs().round(),
    }[content]
    own = move.local_rows[group.rank]
    x = channels_last(images[:, :, :, own.start : own.stop]).requires_grad_()
    traffic.reset()
    with traffic.counting():
        y = move_rows(x, move, group, content)
    padded = torch.cat([images, torch.zeros_like(images[:, :, :, :1])], 3)
    expected = padded[:, :, :, [row if row in range(height) else HEIGHT for row in needed[group.rank]]]
    assert torch.equal(y, expected) and y.movedim(2, -1).is_contiguous()
    weights = random(*y.shape, seed=10 + group.rank)
    (y * weights).sum().backward()
    with pytest.raises(ValueError, match="of each image got 4"):
        move_rows(random(1, 1, C, 4, WIDTH), move, group, Content.DENSE)
    return x.grad, weights, traffic.by_group["cp"].bytes, own


def _all_moved(case: str) -> list[tuple]:
    return [_moved(MOVES[case], height, content) for content, height in zip(Content, HEIGHTS, strict=True)]


@pytest.mark.parametrize("case", MOVES)
def test_rows_and_their_gradients_arrive(ranks, case) -> None:
    everyone = ranks(3, _all_moved, case)
    for number, (content, height) in enumerate(zip(Content, HEIGHTS, strict=True)):
        found = [each[number] for each in everyone]
        expected = torch.zeros(2, 3, C, HEIGHT, WIDTH, dtype=torch.float64)
        for (_, weights, _, _), rows in zip(found, MOVES[case], strict=True):
            for coordinates, row in enumerate(rows):
                if row in range(height):
                    expected[:, :, :, row] += weights[:, :, :, coordinates]
        torch.testing.assert_close(torch.cat([gradient for gradient, *_ in found], 3), expected)
        bits = {Content.DENSE: 64, Content.SPIKES: 1, Content.TERNARY: 2, Content.COUNTS: 8}[content]
        size = bits / 8 * 2 * 3 * C * WIDTH
        for rank, (*_, moved, own) in enumerate(found):
            assert moved == size * sum(row not in own and row in range(height) for row in MOVES[case][rank])


# --- layers


class Flattened(nn.Module):
    """A linear layer over whole images."""

    def __init__(self, height: int) -> None:
        super().__init__()
        self.whole, self.linear = WholeImages(), ParallelLinear(C * height * 5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.whole(x).flatten(2))


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


def has_rows(case: Convolution) -> bool:
    """Whether each of three ranks has a row of the output."""
    return case.layer()(case.input(0).to("meta")).shape[3] >= 3


PLIF, SOFT = NeuronSpec("plif", surrogate="atan"), NeuronSpec("lif", v_reset=None)
STRIPED = [
    Case(partial(ConvNormNeuron, 16, C, size, max_pool=True), (16, height, 12), is_striped=True)
    for size, height in ((3, 12), (3, 15), (5, 16))
]
CASES: dict[str, list[Case]] = {
    "convolutions": [
        *images(lambda: ParallelConv(C, C, 7, padding=3), 3, 8),
        *images(lambda: ParallelConv(C, C, 5, padding=4, dilation=2), 12, 13),
        *images(lambda: ParallelConv(C, C, 3, padding=1, groups=4, bias=True), 6, 7),
        *images(lambda: ParallelConv(C, C, 5, pool=2, padding=2), 12, 13, 8),
        *images(lambda: ParallelConv(C, C, 3, pool=2, padding=1, stride=2), 12, 13),
        *images(lambda: ParallelConv(C, C, 1, stride=2), 7, 8, holds_spikes=False),
        *(
            Case(each.layer, tuple(each.input(0).shape[2:]), holds_spikes=False)
            for each in CONVOLUTIONS
            if has_rows(each)
        ),
    ],
    "units": [
        *images(lambda: ConvNormNeuron(C, C, 3, bias=True, neuron=PLIF), 4, 7),
        *images(lambda: ConvNormNeuron(C, C, 7, stride=2, max_pool=True, neuron=SOFT), 11, 14, holds_spikes=False),
        *images(lambda: ConvNormNeuron(C, C, 3, max_pool=True, norm=nn.Identity()), 7),
        *images(lambda: NeuronConvNorm(C, C, 3), 7, holds_spikes=False),
        *images(MaxPool, 5, 8, holds_spikes=False),
    ],
    "pooled units": [
        *images(lambda: ConvNormNeuron(C, C, 3, max_pool=True), 5, 7, 8),
        *images(lambda: ConvNormNeuron(C, C, 3, max_pool=True, average_pool=2), 11, 14),
        *images(lambda: nn.Sequential(ConvNormNeuron(C, C, 3), MaxPool()), 5, 8),
        *STRIPED,
    ],
    "attention": [
        *images(lambda: SpikingSelfAttention(C, 2, v_threshold=0.1), 4, 7, 60),
        *images(lambda: TokenAttention(C, 2), 7),
        *images(lambda: SpikeDrivenAttention(C), 7, holds_spikes=False),
    ],
    "whole images": [
        *images(lambda: MeanLinear(C, 4), 3, 7, is_alike=True),
        *images(lambda: Flattened(7), 7, is_alike=True),
        *images(lambda: ParallelDropout(0.5, "dropout"), 7),
    ],
    "ties over a border": STRIPED,
}
"""Of heights that ranks share evenly and unevenly, down to a row each."""


def computed(case: Case, context: BuildContext) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of all parameters, as far as this rank has them."""
    group, x = context.state.cp, case.input()
    with building(context):
        layer = case.make()
    with torch.no_grad(), BoundsInference():
        meta = torch.empty_like(x, device="meta")
        shape = apply_layer(layer, mark_spikes(meta, 1) if case.holds_spikes else meta, range(N)).shape
    materialise([("layer", layer)], torch.device("cpu"), seed=1)
    fill_mantissas(layer)
    own = own_span(x.shape[3], group.sizes, group.rank)
    x = channels_last(x[:, :, :, own.start : own.stop]).requires_grad_()
    weights = random(*shape, seed=4)
    y = apply_layer(layer, x, range(N))
    if case.is_alike:
        weights = weights * (group.rank == 0)
    else:
        out = own_span(shape[3], group.sizes, group.rank)
        weights = weights[:, :, :, out.start : out.stop]
    (y * weights).sum().backward()
    gradients = {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}
    return {"y": y.detach(), "x": x.grad, **gradients}


def _run(name: str, backend: str, **options: bool) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """What one rank computes, and this rank's share of it."""
    one = BuildContext(numerics=Numerics(torch.float64, torch.float64, backend, **options))
    shared = replace(one, state=state_of(everybody("cp")), context_cut="rows")
    return [(computed(case, one), computed(case, shared)) for case in CASES[name]]


def require_equal(found: list, name: str) -> None:
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


@pytest.mark.parametrize("name", [*CASES][:-1])
def test_rows_of_what_one_rank_computes(ranks, name: str) -> None:
    for size in (2, 3):
        require_equal(ranks(size, _run, name, "torch"), name)
    if name == "pooled units":
        require_equal(ranks(3, _run, name, "fused"), name)


def _sparse_on_the_second_rank() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Ranks choose sums over spikes by what they measure: here the second one alone does."""
    is_second = everybody("cp").rank == 1
    with mock.patch("megasnn.kernels.numba.spike_sums.Work.is_worth", lambda self, share, threads=1: is_second):
        return _run("ties over a border", "fused", sparse_products=True)


def test_a_tie_over_a_border_is_broken_as_on_one_rank_where_neighbours_form_products_in_other_ways(ranks) -> None:
    require_equal(ranks(2, _sparse_on_the_second_rank), "ties over a border")


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
    with building(BuildContext(ParallelState.without_process_groups(Grid(cp=3)), context_cut="rows")):
        layer = make()
    with pytest.raises(ValueError, match=f"--context-parallel-size may be {most} at most"):
        layer(torch.empty(T, N, C, height, 5, device="meta"))
