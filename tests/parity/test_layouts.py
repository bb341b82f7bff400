"""Every layout computes what SpikingJelly's own model computes: one step in float64, to 1e-9 relative."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.parity.beside import SPIKFORMER, assert_equal_to_truth, run
from tests.parity.ranks import Layout, assemble, error, name_of


def layouts() -> list[object]:
    """All that fit 8 ranks, with both schedules where there is a pipeline; the suite takes one of the two for each."""
    found: list[object] = []
    for data, tensor, pipeline in product((1, 2), (1, 2, 4), (1, 2, 4)):
        if data * tensor * pipeline <= 8:
            usual, other = ("1f1b", "gpipe") if (data * tensor) % 4 else ("gpipe", "1f1b")
            found.append(Layout(data, tensor, pipeline, usual))
            if pipeline > 1:
                found.append(pytest.param(Layout(data, tensor, pipeline, other), marks=pytest.mark.matrix))
    return found


@pytest.mark.parametrize("layout", layouts(), ids=name_of)
def test_layout_equals_spikingjelly(ranks, layout: Layout) -> None:
    assert_equal_to_truth(SPIKFORMER, ranks, layout)


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 2, 2)], ids=name_of)
def test_plain_neurons_equal_spikingjelly(ranks, layout: Layout) -> None:
    assert_equal_to_truth(SPIKFORMER, ranks, layout, backend="torch")


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
