"""Replicas that share one copy of the weights by rows compute what SpikingJelly computes: one step in float64."""

from __future__ import annotations

import pytest

from tests.parity import test_layouts as spikformer
from tests.parity.ranks import Layout
from tests.parity.test_layouts import name_of

CHOSEN = [
    Layout(2, 1, 1, weight=2),
    Layout(4, 1, 1, weight=2),
    Layout(4, 1, 1, weight=4),
    Layout(2, 2, 2, "zbv", weight=2),
    Layout(2, 1, 2, "1f1b", weight=2),
]


@pytest.mark.parametrize("layout", CHOSEN, ids=name_of)
def test_spikformer(ranks, layout: Layout) -> None:
    spikformer.assert_equal_to_reference(spikformer.run_step(ranks, layout), spikformer.truth())
