"""Every layout computes what SpikingJelly's own model computes: one step in float64, to 1e-9 relative.

The suite takes each axis, schedule and option with each other once; `pytest -m matrix` takes all layouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.parity.beside import SPIKFORMER, assert_equal_to_truth, run
from tests.parity.ranks import IMAGE_CUTS, Layout, assemble, error, name_of

SIZES = {1: (3, 3, 3, 2), 2: (3, 3, 3, 2), 4: (6, 5)}
"""Of micro-batches, by the number of ranks that share each: none has equally many samples of all of them."""


def on(usual: Iterable[Layout], every: Iterable[Layout]) -> Any:
    layouts = dict.fromkeys(usual, ()) | dict.fromkeys(set(every) - set(usual), pytest.mark.matrix)
    cases = [pytest.param(layout, marks=marks) for layout, marks in sorted(layouts.items(), key=str)]
    return pytest.mark.parametrize("layout", cases, ids=lambda layout: name_of(layout))


def with_each_cut(layouts: Iterable[Layout]) -> list[Layout]:
    """Ranks that share micro-batches, by samples and by rows of images."""
    return [replace(layout, cut=cut) for cut, layout in product(IMAGE_CUTS, layouts)]


# With both schedules where there is a pipeline.
GRIDS = [grid for grid in product((1, 2), (1, 2, 4), (1, 2, 4)) if grid[0] * grid[1] * grid[2] <= 8]
EVERY = [
    Layout(*grid, schedule) for grid in GRIDS for schedule in ("1f1b", "gpipe") if grid[2] > 1 or schedule == "1f1b"
]
USUAL = [Layout(*grid, "1f1b" if grid[0] * grid[1] % 4 or grid[2] == 1 else "gpipe") for grid in GRIDS]

SHARED_WEIGHTS = [
    Layout(data, tensor, pipeline, schedule, weight=weight, scatters=scatters, recompute=recompute)
    for weight, data, tensor, pipeline in product((2, 4), (2, 4), (1, 2), (1, 2))
    if weight <= data and data * tensor * pipeline <= 8
    for schedule in (("1f1b", "zbv") if pipeline > 1 else ("1f1b",))
    for scatters, recompute in product((False, True), (None, "always"))
]
USUAL += [
    Layout(1, 1, 4, "v-min"),
    Layout(1, 2, 2, "zb2p"),
    Layout(2, 2, 2, "interleaved", 2),
    Layout(2, 1, 1, weight=2),
    Layout(4, 1, 1, weight=2, scatters=True, recompute="always"),
    Layout(4, 1, 2, "zbv", weight=2, scatters=True),
    Layout(4, 2, 1, weight=4, recompute="always"),
    Layout(2, 2, 2, "zbv", weight=2, recompute="always"),
    Layout(2, 2, 2, "1f1b", weight=2, scatters=True),
    Layout(4, 1, 2, "1f1b", weight=4),
]

SHARED_SAMPLES = with_each_cut(
    Layout(data, tensor, pipeline, schedule, context=context)
    for context, data, tensor, pipeline in product((2, 4), (1, 2), (1, 2), (1, 2))
    if context * data * tensor * pipeline <= 8
    for schedule in (("1f1b", "zbv") if pipeline > 1 else ("1f1b",))
)
USUAL += with_each_cut(
    [
        Layout(context=2),
        Layout(2, 1, 2, "zbv", context=2),
        Layout(1, 2, 2, "1f1b", context=2),
        Layout(1, 2, 1, context=4),
        Layout(2, 1, 2, "1f1b", weight=2, context=2, recompute="always"),
    ]
)


@on(USUAL, [*EVERY, *SHARED_WEIGHTS, *SHARED_SAMPLES])
def test_layout_equals_spikingjelly(ranks, layout: Layout) -> None:
    assert_equal_to_truth(replace(SPIKFORMER, sizes=SIZES[layout.context]), ranks, layout)


@pytest.mark.parametrize("cuts", [(0, 5), (3, 3), (1, 10), (9, 10)])
def test_any_cut_including_empty_stages(ranks, cuts: tuple[int, int]) -> None:
    first, second = cuts
    bounds = [range(0, first), range(first, second), range(second, 10)]
    assert_equal_to_truth(SPIKFORMER, ranks, Layout(pipeline=3), bounds=bounds)


def test_tensor_parallel_float32_differs_by_rounding_only(ranks) -> None:
    """In float32 a rounding difference may flip a spike; here none does, and gradients agree to float32's precision."""
    one, two = (
        assemble([step for (step,) in run(SPIKFORMER, ranks, layout, torch.float32)], "gradients")
        for layout in (Layout(), Layout(tensor=2))
    )
    assert max(error(two[name], one[name]) for name in one) < 1e-3
