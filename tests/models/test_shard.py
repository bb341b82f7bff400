"""Networks of torch's and SpikingJelly's layers, given to `megasnn.shard`, beside themselves, on every layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.models import networks
from tests.parity import spikingjelly_reference as reference
from tests.parity.ranks import Layout, assemble
from tests.parity.test_layouts import TOLERANCE, error, logits_in_order, name_of

LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(2, 2, 1),
    Layout(1, 4, 2, "zbv"),
    Layout(pipeline=2),
    Layout(1, 1, 4, "1f1b"),
    Layout(2, 2, 2, "zbv"),
]
USUAL = {"vgg": (0, 2, 3), "residual": (0, 1, 3, 6), "signals": (0, 2, 4)}


def _pair(name: str, index: int) -> Any:
    marks = [] if index in USUAL[name] else [pytest.mark.matrix]
    return pytest.param(name, LAYOUTS[index], id=f"{name}-{name_of(LAYOUTS[index])}", marks=marks)


@cache
def truth(name: str) -> reference.ReferenceStep:
    return reference.step(networks.build(name), *networks.data(name), networks.SIZES)


@pytest.mark.parametrize(("name", "layout"), [_pair(name, i) for name in USUAL for i in range(len(LAYOUTS))])
def test_a_layout_computes_what_the_network_does(ranks, name: str, layout: Layout) -> None:
    expected = truth(name)
    assert 0.02 < expected.firing < 0.7 and all(grad.abs().max() > 0 for grad in expected.gradients.values())
    steps = ranks(layout.world_size, networks.one_step, name, layout, expected.state_before)
    assert all(step.loss == pytest.approx(expected.loss, rel=TOLERANCE) for step in steps)
    assert sum(step.spikes for step in steps) == expected.spikes, "spikes flipped"
    for ours, theirs in zip(logits_in_order(steps), expected.logits, strict=True):
        assert error(ours, theirs) < TOLERANCE
    for what in ("gradients", "buffers"):
        found = assemble(steps, what)
        values = getattr(expected, what)
        assert found.keys() == values.keys() - (expected.gradients.keys() if what == "buffers" else set())
        for tensor, value in found.items():
            # A bias before a batch norm has no gradient but what rounding leaves of it.
            nothing = max(value.abs().max(), values[tensor].abs().max()) < 1e-12
            assert nothing or error(value, values[tensor]) < TOLERANCE, tensor
