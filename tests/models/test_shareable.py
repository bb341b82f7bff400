"""Which layers ranks may compute that share micro-batches: they say what they mix, and others are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from megasnn.common.grid import Grid
from megasnn.layers import (
    BuildContext,
    ConvNormNeuron,
    MaxPool,
    MeanOverSpace,
    ParallelConv,
    WholeImages,
)
from megasnn.layers.layer import FunctionLayer, layer
from megasnn.models.build import describe_model
from megasnn.models.model import Model
from megasnn.parallel_state import ParallelState
from tests.models.networks import Integrates, between
from tests.parity.ranks import Layout, RankStep, assert_equal, one_step


class Scaled(nn.Module):
    """Says that it takes each row by itself."""

    mixes_rows: bool | None = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4, 1, 1))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.7)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class Silent(Scaled):
    mixes_rows = None


class WithUnit(nn.Module):
    """Has a layer of ours in it, and says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = ConvNormNeuron(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(x).flip(3)


class TwoHeights(nn.Module):
    """Calls a layer with images of two heights."""

    mixes_rows = False

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.unit, self.pool, self.twice = ConvNormNeuron(4, 4), MaxPool(), make()

    def forward(self, x: Tensor) -> Tensor:
        y = self.unit(x)
        self.twice(y), self.twice(self.pool(y))
        return y


class Own(Integrates):
    """Neurons of one's own."""

    def fire(self, h: Tensor, state: dict[str, Tensor]) -> Tensor:
        return self.spike(h - 0.3)


def model_of(*makers: Callable[[], nn.Module]) -> Model:
    return between(lambda: [layer(f"middle.{n}", make()) for n, make in enumerate(makers)], image_size=6)


def built(model: Model, cut: str) -> None:
    """On a rank that shares micro-batches with another."""
    describe_model(model).build(BuildContext(ParallelState.without_process_groups(Grid(cp=2)), context_cut=cut))


REFUSED: dict[str, tuple[str, Callable[[], nn.Module], str]] = {
    "silent": ("rows", Silent, "Silent"),
    "within": ("rows", lambda: nn.Sequential(nn.ReLU(), nn.AvgPool2d(3, 1, 1)), r"1 \(AvgPool2d\)"),
    "around ours": ("rows", WithUnit, "WithUnit"),
    "a function": ("rows", lambda: FunctionLayer(torch.relu), "FunctionLayer"),
    **{
        f"twice, {name}": ("rows", partial(TwoHeights, make), f"{name} .*6 rows and of 3")
        for name, make in {
            "MaxPool": MaxPool,
            "MeanOverSpace": MeanOverSpace,
            "ParallelConv": lambda: ParallelConv(4, 4, 3, padding=1),
            "WholeImages": WholeImages,
        }.items()
    },
    "too few rows": ("rows", lambda: ConvNormNeuron(4, 4, 6, padding=0), "--context-parallel-size may be 1 at most"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused_by_name(name: str) -> None:
    cut, make, names = REFUSED[name]
    with pytest.raises(ValueError, match=rf"middle\.0.*{names}"):
        built(model_of(make), cut)
    if "few" not in name:
        built(model_of(make), "samples" if cut == "rows" else "rows")


def test_edges_that_other_ranks_have_need_whole_images() -> None:
    around = partial(ParallelConv, 4, 4, 3, padding=1, padding_mode="circular")
    with pytest.raises(ValueError, match="the layer behind stem: .*'circular'.*--context-parallel-cut samples"):
        built(model_of(around), "rows")
    built(model_of(around), "samples")


def step_of_modules_that_say_it(layout: Layout) -> RankStep:
    """Among them torch's own that take each element by itself, with a parameter, and neurons of one's own."""
    return one_step(model_of(Scaled, nn.Tanh, lambda: nn.Sequential(nn.Identity(), Scaled()), lambda: Own(4)), layout)


def test_modules_that_say_it_are_computed_on_rows(ranks) -> None:
    cut = ranks(2, step_of_modules_that_say_it, Layout(context=2, cut="rows"))
    assert_equal(cut, ranks(1, step_of_modules_that_say_it, Layout()))
