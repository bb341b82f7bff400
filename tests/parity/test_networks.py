"""Other models on every layout, SpikingJelly's family and networks of one's own: steps equal those of SpikingJelly's
modules under torch's SGD, to 1e-9 relative in float64, no spike flipped."""

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
from tests.parity.networks import CASES as OWN
from tests.parity.ranks import Layout
from tests.parity.zoo import CASES as ZOO

CASES = ZOO | OWN
# SEW-ResNet's other connections differ in one line.
CHOSEN_OF = {"sew_resnet-and": [CHOSEN[0], CHOSEN[-1]], "sew_resnet-iand": [CHOSEN[0], CHOSEN[-1]], "sew_resnet-34": []}
CHOSEN_OF |= {name: [CHOSEN[1], CHOSEN[-1]] for name in OWN if name not in ("plain", "called-again")}
CHOSEN_OF |= {"shard-maxformer": CHOSEN[1:2]}
OFTEN = ["sew_resnet-iand", "qkformer", "spike_driven"]
OFTEN += ["plain", "called-again", "shard-maxformer", "shard-vgg", "adaptive"]
RARE = [pytest.param(name, marks=pytest.mark.matrix) for name in OWN if name not in OFTEN]


@pytest.mark.parametrize(("case", "layout"), list(on_layouts(CASES, CHOSEN_OF)))
def test_layout_equals_spikingjelly(ranks, case: Case, layout: Layout) -> None:
    assert_equal_to_truth(case, ranks, layout)


@pytest.mark.parametrize("name", [*OFTEN, *RARE])
@few_pipelines_or_all
def test_schedules_agree_bit_for_bit(ranks, name: str, layouts: list[Layout]) -> None:
    assert_schedules_agree(ranks, CASES[name], layouts)
