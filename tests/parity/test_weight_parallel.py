"""Replicas that share one copy of the weights by rows compute what one rank computes: in float64, to 1e-9 relative.

The suite takes each axis, schedule and way of scattering gradients with each other once; `pytest -m matrix` takes all.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.parity.beside import SPIKFORMER, assert_equal_to_truth
from tests.parity.ranks import Layout, name_of
from tests.parity.test_vgg import require_equal
from tests.parity.vgg import DROPOUT

GRIDS = [
    (data, tensor, pipeline, schedule, weight)
    for weight, copies, tensor, pipeline in product((2, 4), (1, 2), (1, 2), (1, 2))
    for schedule in (("1f1b", "zbv") if pipeline > 1 else ("1f1b",))
    if (data := weight * copies) <= 4 and data * tensor * pipeline <= 8
]
EVERY = [
    Layout(data, tensor, pipeline, schedule, weight=weight, scatters=scatters, recompute=recompute)
    for (data, tensor, pipeline, schedule, weight), scatters, recompute in product(
        GRIDS, (False, True), (None, "always")
    )
]
CHOSEN = [
    Layout(2, 1, 1, weight=2),
    Layout(4, 1, 1, weight=2, scatters=True, recompute="always"),
    Layout(4, 1, 2, "zbv", weight=2, scatters=True),
    Layout(4, 2, 1, weight=4, recompute="always"),
    Layout(2, 2, 2, "zbv", weight=2, recompute="always"),
    Layout(2, 2, 2, "1f1b", weight=2, scatters=True),
    Layout(4, 1, 2, "1f1b", weight=4),
]


def _name(layout: Layout) -> str:
    return f"{name_of(layout)}{'-scatters' * layout.scatters}{'-again' * bool(layout.recompute)}"


def _on(chosen: list[Layout]) -> Any:
    every = [*chosen, *(pytest.param(each, marks=pytest.mark.matrix) for each in EVERY if each not in chosen)]
    return pytest.mark.parametrize("layout", every, ids=_name)


@_on(CHOSEN)
def test_spikformer(ranks, layout: Layout) -> None:
    assert_equal_to_truth(SPIKFORMER, ranks, layout)


@_on(CHOSEN[1:3])
def test_vgg_with_dropout(ranks, layout: Layout) -> None:
    require_equal(ranks, layout, DROPOUT)
