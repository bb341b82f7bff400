"""The models of SpikingJelly's family on every layout: one step in float64, to 1e-9 relative, no spike flipped."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from tests.parity import spikingjelly_reference as reference
from tests.parity import zoo
from tests.parity.ranks import Layout, RankStep, assemble
from tests.parity.test_layouts import TOLERANCE, error, logits_in_order, name_of
from tests.parity.zoo import CASES, SIZES

CHOSEN = [
    Layout(),
    Layout(tensor=2),
    Layout(pipeline=2),
    Layout(2, 2, 1),
    Layout(1, 1, 4, "1f1b"),
    Layout(2, 2, 2, "zbv"),
]
ALL = [
    Layout(data, tensor, pipeline, schedule)
    for data, tensor, pipeline in product((1, 2), (1, 2), (1, 2, 4))
    for schedule in (("1f1b", "zbv") if pipeline > 1 else ("1f1b",))
    if data * tensor * pipeline <= 8
]


@cache
def truth(name: str) -> reference.ReferenceStep:
    return reference.step(zoo.build(CASES[name]), *zoo.data(CASES[name].model), SIZES)


def assert_equal_to_reference(name: str, steps: list[RankStep], expected: reference.ReferenceStep) -> None:
    ours = CASES[name].model.from_spikingjelly
    assert all(step.loss == pytest.approx(expected.loss, rel=TOLERANCE) for step in steps)
    assert sum(step.spikes for step in steps) == expected.spikes, "spikes flipped"
    for mine, theirs in zip(logits_in_order(steps), expected.logits, strict=True):
        assert error(mine.mean(0), theirs.mean(0)) < TOLERANCE
    gradients, buffers = assemble(steps, "gradients"), assemble(steps, "buffers")
    assert len(gradients) == len(expected.gradients) > 10
    expected_gradients = ours({**expected.state_before, **expected.gradients})
    for tensor, value in gradients.items():
        expected_gradient = expected_gradients[tensor]
        if tensor.endswith(("conv.bias", "projection.bias")):  # cancels against a norm's mean: what rounding leaves
            assert max(value.abs().max(), expected_gradient.abs().max()) < 1e-12, tensor
        else:
            assert error(value, expected_gradient) < TOLERANCE, tensor
    expected_buffers = ours({**expected.state_before, **expected.buffers})
    for tensor, value in buffers.items():
        assert error(value, expected_buffers[tensor]) < TOLERANCE, tensor


@pytest.mark.parametrize("name", CASES)
def test_the_reference_fires(name: str) -> None:
    """The comparison means something: neurons fire, some do not, and every weight has a gradient."""
    expected = truth(name)
    assert 0.02 < expected.firing < 0.6
    assert all(gradient.abs().max() > 0 for gradient in expected.gradients.values())


CHOSEN_OF = {"sew_resnet-and": [CHOSEN[0], CHOSEN[-1]], "sew_resnet-iand": [CHOSEN[0], CHOSEN[-1]], "sew_resnet-34": []}
"""Of SEW-ResNet's other connections, which differ in one line, and of its other depth."""


def _pairs() -> Iterator[Any]:
    """A choice of layouts for each model, and the rest under the marker."""
    for name in CASES:
        chosen = CHOSEN_OF.get(name, CHOSEN)
        for layout in dict.fromkeys([*chosen, *CHOSEN, *ALL]):
            marks = [] if layout in chosen else [pytest.mark.matrix]
            yield pytest.param(name, layout, id=f"{name}-{name_of(layout)}", marks=marks)


@pytest.mark.parametrize(("name", "layout"), list(_pairs()))
def test_layout_equals_spikingjelly(ranks, name: str, layout: Layout) -> None:
    steps = ranks(layout.world_size, zoo.one_step, name, layout, truth(name).state_before)
    assert_equal_to_reference(name, steps, truth(name))


@pytest.mark.parametrize("name", ["sew_resnet-iand", "qkformer", "spike_driven"])
def test_schedules_agree_bit_for_bit(ranks, name: str) -> None:
    dtype = torch.float32
    one, *others = (
        assemble(ranks(layout.world_size, zoo.one_step, name, layout, None, dtype), "gradients")
        for layout in (Layout(), Layout(pipeline=2), Layout(1, 1, 2, "zbv"), Layout(1, 1, 4, "gpipe"))
    )
    for other in others:
        assert all(torch.equal(other[tensor], value) for tensor, value in one.items())
