"""The models of SpikingJelly's family on every layout: one step in float64, to 1e-9 relative, no spike flipped."""

from __future__ import annotations

import pytest

from tests.parity.beside import (
    CHOSEN,
    Case,
    assert_equal_to_truth,
    assert_schedules_agree,
    few_pipelines_or_all,
    on_layouts,
)
from tests.parity.ranks import Layout
from tests.parity.zoo import CASES

CHOSEN_OF = {"sew_resnet-and": [CHOSEN[0], CHOSEN[-1]], "sew_resnet-iand": [CHOSEN[0], CHOSEN[-1]], "sew_resnet-34": []}
"""Of SEW-ResNet's other connections, which differ in one line, and of its other depth."""


@pytest.mark.parametrize(("case", "layout"), list(on_layouts(CASES, CHOSEN_OF)))
def test_layout_equals_spikingjelly(ranks, case: Case, layout: Layout) -> None:
    assert_equal_to_truth(case, ranks, layout)


@few_pipelines_or_all
@pytest.mark.parametrize("name", ["sew_resnet-iand", "qkformer", "spike_driven"])
def test_schedules_agree_bit_for_bit(ranks, name: str, layouts: list[Layout]) -> None:
    assert_schedules_agree(ranks, CASES[name], layouts)
