"""Other models on every layout, SpikingJelly's family and networks of one's own: steps equal those of SpikingJelly's
modules under torch's SGD, or of one rank, to 1e-9 relative in float64, no spike flipped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from megasnn.models.model import Model
from megasnn.models.vgg_dvs.model import VggDvs
from tests.models.given_to_shard import Dropping
from tests.models.test_own_neurons import Own
from tests.models.test_replicated import Pooled, Signals, WholeOutputs
from tests.parity.beside import (
    CHOSEN,
    Case,
    assert_equal_to_truth,
    assert_schedules_agree,
    few_pipelines_or_all,
    on_layouts,
)
from tests.parity.networks import CASES as OWN
from tests.parity.networks import MODELS
from tests.parity.ranks import LAYOUTS, SIZES, Layout, RankStep, assemble, assert_equal, name_of, one_step
from tests.parity.zoo import CASES as ZOO

CASES = ZOO | OWN
# SEW-ResNet's other connections differ in one line.
CHOSEN_OF = {"sew_resnet-and": [CHOSEN[0], CHOSEN[-1]], "sew_resnet-iand": [CHOSEN[0], CHOSEN[-1]], "sew_resnet-34": []}
CHOSEN_OF["e_spikeformer"] = [*CHOSEN[:2], Layout(1, 1, 2, "zbv")]
CHOSEN_OF |= {name: [CHOSEN[1], CHOSEN[-1]] for name in OWN if name not in ("plain", "called-again")}
CHOSEN_OF |= {name: CHOSEN[1:2] for name in ("shard-maxformer", "event-frames")}
OFTEN = ["sew_resnet-iand", "qkformer", "spike_driven"]
OFTEN += ["plain", "called-again", "shard-maxformer", "shard-vgg", "adaptive"]
RARE = [pytest.param(name, marks=pytest.mark.matrix) for name in (*OWN, "e_spikeformer") if name not in OFTEN]


@pytest.mark.parametrize(("case", "layout"), list(on_layouts(CASES, CHOSEN_OF)))
def test_layout_equals_spikingjelly(ranks, case: Case, layout: Layout) -> None:
    assert_equal_to_truth(case, ranks, layout)


@pytest.mark.parametrize("name", [*OFTEN, *RARE])
@few_pipelines_or_all
def test_schedules_agree_bit_for_bit(ranks, name: str, layouts: list[Layout]) -> None:
    assert_schedules_agree(ranks, CASES[name], layouts)


# --- beside one rank

IN_STAGES = [Layout(1, 1, 2, "zbv"), Layout(1, 1, 3, "interleaved", 2), Layout(2, 2, 2, "1f1b")]
TIED_IN_STAGES = [Layout(1, 1, 4, "gpipe"), *IN_STAGES[1:], Layout(1, 2, 2, "zbv")]
SHARED_WEIGHTS = [Layout(3, 1, 1, weight=3), Layout(3, 1, 2, "zbv", weight=3, scatters=True), Layout(2, 1, 2, weight=2)]
SHARED_SAMPLES = {
    "bundles": Layout(context=2),
    "qkformer": Layout(1, 1, 2, "zbv", context=2),
    "tied": Layout(1, 1, 2, context=2),
}
SMALL_VGG = VggDvs(channels="8,8,P,16", image_size=14, time_steps=2, num_classes=5)
BY_ROWS: dict[str, tuple[Model, int]] = {
    name: (replace(case.model, image_size=64) if "sew" in name else case.model, 2) for name, case in ZOO.items()
} | {"seven rows": (SMALL_VGG, 2), "three ranks": (replace(SMALL_VGG, channels="8,8,P,16,P"), 3)}
"""A model and the ranks that share its rows, of which each has one of every layer."""

Row = tuple[str, Model, Layout, int, bool]


def _rows() -> Iterator[Row]:
    """(name, model, layout, size of a micro-batch, whether the suite takes it)."""
    for name, layouts in (("unet", IN_STAGES), ("bundles", IN_STAGES), ("tied", TIED_IN_STAGES)):
        yield from ((name, MODELS[name], layout, SIZES[0], True) for layout in layouts)
    # What neurons of counts have besides is seen where they meet other ranks.
    for kind, layout in product(("CountingLIF", "TernaryLIF"), LAYOUTS):
        yield kind, Own(kind=kind), layout, SIZES[0], layout.tensor * layout.pipeline == 4
    for model in (WholeOutputs(), Signals(), Pooled(), Dropping()):
        yield type(model).__name__, model, Layout(tensor=2), SIZES[0], True
    yield "Dropping", Dropping(), Layout(1, 2, 2), SIZES[0], True
    # Three replicas with a micro-batch each, whose rows do not divide; two with one each: those that share weights have
    # equally many. The suite takes every second model, each on one of these layouts in turn.
    for number, (name, model) in enumerate(MODELS.items()):
        for at, layout in enumerate(SHARED_WEIGHTS):
            usual = number % 2 == 0 and at == number // 2 % 3 or name == "tied"
            yield name, model, layout, 3 if layout.data == 2 else SIZES[0], usual
    for name, model in MODELS.items():
        layout = SHARED_SAMPLES.get(name, Layout(1, 2 if name in ZOO else 1, 1, context=2))
        yield name, model, layout, 3, name in SHARED_SAMPLES
    for name, (model, context) in BY_ROWS.items():
        yield name, model, Layout(context=context, cut="rows"), 1, name not in ZOO or name == "qkformer"


def _parameters() -> Iterator[Any]:
    for name, model, layout, size, usual in _rows():
        marks = () if usual else pytest.mark.matrix
        yield pytest.param(model, layout, size, id=f"{name}-{name_of(layout)}", marks=marks)


@pytest.fixture(scope="module")
def one_rank(ranks) -> Any:
    """(model, size of a micro-batch) -> its step on one rank."""
    return cache(lambda model, size: ranks(1, one_step, model, Layout(), torch.float64, size))


@pytest.mark.parametrize(("model", "layout", "size"), [*_parameters()])
def test_layout_equals_one_rank(ranks, one_rank, model: Model, layout: Layout, size: int) -> None:
    """Bit for bit where only stages are cut."""
    one: list[RankStep] = one_rank(model, size)
    found = ranks(layout.world_size, one_step, model, layout, torch.float64, size)
    assert_equal(found, one)
    if layout.world_size == layout.pipeline:
        assert one[0].spikes > 100
        gradients = assemble(one, "gradients")
        learns = {name for name in gradients if not name.endswith("conv.bias") and "drive.conv" not in name}
        assert all(gradients[name].abs().max() > 0 for name in learns)
        assert {(step.loss, step.norm) for step in found} == {(one[0].loss, one[0].norm)}
        for what in ("gradients", "buffers"):
            expected = assemble(one, what)
            assert all(torch.equal(value, expected[name]) for name, value in assemble(found, what).items())
