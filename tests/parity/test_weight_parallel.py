"""Replicas that share one copy of the weights by rows compute what one rank computes: in float64, to 1e-9 relative.

The suite takes each axis, schedule and way of scattering gradients with each other once; `pytest -m matrix` takes all.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from megasnn.kernels import NeuronSpec
from megasnn.models.model import Model
from tests.models.steps import SIZES, assert_equal, one_step
from tests.parity import spikingjelly_reference as reference
from tests.parity import test_layouts as spikformer
from tests.parity import test_vgg as vgg
from tests.parity.networks import MODELS
from tests.parity.ranks import Layout, assemble
from tests.parity.ranks import one_step as run_step
from tests.parity.test_layouts import TOLERANCE, error, name_of

GRIDS = [
    (data, tensor, pipeline, schedule, weight)
    for weight, copies, tensor, pipeline in product((2, 4), (1, 2), (1, 2), (1, 2))
    for schedule in (("1f1b", "zbv") if pipeline > 1 else ("1f1b",))
    if (data := weight * copies) <= 4 and data * tensor * pipeline <= 8
]
EVERY = [
    Layout(data, tensor, pipeline, schedule, weight=weight, scatters=scatters, recompute=recompute)
    for (data, tensor, pipeline, schedule, weight), scatters, recompute in product(
        GRIDS, (False, True), ("never", "always")
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
    return f"{name_of(layout)}{'-scatters' * layout.scatters}-{layout.recompute}"


def _on(chosen: list[Layout]) -> Any:
    every = [*chosen, *(pytest.param(each, marks=pytest.mark.matrix) for each in EVERY if each not in chosen)]
    return pytest.mark.parametrize("layout", every, ids=_name)


@_on(CHOSEN)
def test_spikformer(ranks, layout: Layout) -> None:
    spikformer.assert_equal_to_reference(spikformer.run_step(ranks, layout), spikformer.truth())


@_on(CHOSEN[1:3])
def test_vgg_with_dropout(ranks, layout: Layout) -> None:
    vgg.assert_equal_to_reference(vgg.run_step(ranks, layout, vgg.DROPOUT), vgg.truth(vgg.DROPOUT))


@pytest.mark.parametrize(
    "layout", [Layout(2, 2, 2, "zbv", weight=2, scatters=scatters) for scatters in (False, True)], ids=_name
)
def test_learned_time_constants(ranks, layout: Layout) -> None:
    """A number is its first owner's, and its gradient is summed over tensor parallel ranks too."""
    spec = NeuronSpec(kind="plif")
    arguments = None, *reference.data(sum(spikformer.SIZES)), spikformer.SIZES[0], torch.float64, "auto", spec
    one, found = (ranks(each.world_size, run_step, each, *arguments) for each in (Layout(), layout))
    assert all(step.loss == pytest.approx(one[0].loss, rel=TOLERANCE) for step in found)
    assert sum(step.spikes for step in found) == one[0].spikes
    expected, gradients = assemble(one, "gradients"), assemble(found, "gradients")
    assert any(name.endswith(".w") for name in expected) and expected.keys() == gradients.keys()
    for name, value in expected.items():
        assert error(gradients[name], value) < TOLERANCE, name


def _networks() -> Iterator[Any]:
    """Three replicas with a micro-batch each, whose rows do not divide; two with one each. The suite takes every
    second model, each on one of these layouts in turn."""
    layouts = [Layout(3, 1, 1, weight=3), Layout(3, 1, 2, "zbv", weight=3, scatters=True), Layout(2, 1, 2, weight=2)]
    for number, (name, model) in enumerate(MODELS.items()):
        for at, layout in enumerate(layouts):
            marks = () if number % 2 == 0 and at == number // 2 % 3 or name == "tied" else pytest.mark.matrix
            yield pytest.param(model, layout, id=f"{name}-{_name(layout)}", marks=marks)


@pytest.mark.parametrize(("model", "layout"), [*_networks()])
def test_other_models(ranks, model: Model, layout: Layout) -> None:
    size = 3 if layout.data == 2 else SIZES[0]  # replicas that share weights have equally many micro-batches
    found = ranks(layout.world_size, one_step, model, layout, torch.float64, size)
    assert_equal(found, ranks(1, one_step, model, Layout(), torch.float64, size))
