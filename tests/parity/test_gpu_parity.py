"""The parity that tools/check_gpu.py shows on a GPU: a step in float64 against SpikingJelly's, on ranks of the CPU, and
on ranks that share one GPU."""

from __future__ import annotations

import pytest
import torch

from tools.benchmark.gpu import Setting
from tools.benchmark.gpu_parity import CLOSE, LAYOUTS, Layout, Part, differences, parity, rank_step, truth

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def alone() -> Part:
    return rank_step(Layout(), truth().weights, CPU)


def test_the_reference_fires() -> None:
    """The comparison means something: neurons fire, and every gradient is there."""
    expected = truth()
    assert expected.spikes > 1000 and len(expected.gradients) > 30
    assert all(gradient.abs().max() > 0 for gradient in expected.gradients.values())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_equals_spikingjelly(ranks, layout: Layout) -> None:
    found = differences(layout, ranks(layout.ranks, rank_step, layout, truth().weights, CPU), truth())
    assert max(found.loss, found.gradients) < CLOSE and found.spikes == 0


def test_what_differs_is_seen(alone: Part) -> None:
    expected = truth()
    name, pieces = next(iter(alone.gradients.items()))
    for factor in (1.01, float("nan")):
        wrong = {**alone.gradients, name: [(piece, factor * local) for piece, local in pieces]}
        found = differences(Layout(), [Part(alone.loss, alone.spikes + 1, wrong)], expected)
        assert not found.gradients < 0.009 and found.loss < CLOSE and found.spikes == 1
    assert not differences(Layout(), [Part(float("nan"), 0, alone.gradients)], expected).loss < CLOSE
    lacking = {each: value for each, value in alone.gradients.items() if each != name}
    with pytest.raises(RuntimeError, match=f"no rank has all of the gradient of {name}"):
        differences(Layout(), [Part(alone.loss, alone.spikes, lacking)], expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_layouts_on_a_gpu_equal_spikingjelly() -> None:
    """With two and four ranks on one GPU, over Gloo."""
    figures = list(parity(Setting(torch.device("cuda", 0))))
    assert len(figures) == 2 * len(LAYOUTS) and all(each.is_met for each in figures), figures
