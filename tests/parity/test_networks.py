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
    FEW_PIPELINES,
    Case,
    assert_equal_to_truth,
    assert_schedules_agree,
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
IN_FEW_PIPELINES = ["sew_resnet-iand", "qkformer", "spike_driven", "plain", "called-again", "adaptive"]
IN_FEW_PIPELINES += ["shard-maxformer", "shard-vgg"]


@pytest.mark.parametrize(("case", "layout"), list(on_layouts(CASES, CHOSEN_OF)))
def test_layout_equals_spikingjelly(ranks, case: Case, layout: Layout) -> None:
    assert_equal_to_truth(case, ranks, layout)


@pytest.mark.parametrize("name", IN_FEW_PIPELINES)
def test_schedules_agree_bit_for_bit(ranks, name: str) -> None:
    assert_schedules_agree(ranks, CASES[name], FEW_PIPELINES)


# --- beside one rank

IN_STAGES = [Layout(1, 1, 2, "zbv"), Layout(1, 1, 3, "interleaved", 2), Layout(2, 2, 2, "1f1b")]
TIED_IN_STAGES = [Layout(1, 1, 4, "gpipe"), *IN_STAGES[1:], Layout(1, 2, 2, "zbv")]
SHARED_WEIGHTS = [Layout(3, 1, 1, weight=3), Layout(3, 1, 2, "zbv", weight=3, scatters=True), Layout(2, 1, 2, weight=2)]
SMALL_VGG = VggDvs(channels="8,8,P,16", image_size=14, time_steps=2, num_classes=5)
SHARED_SAMPLES = [
    ("bundles", MODELS["bundles"], Layout(context=2), 3),
    ("qkformer", MODELS["qkformer"], Layout(1, 1, 2, "zbv", context=2), 3),
    ("tied", MODELS["tied"], Layout(1, 1, 2, context=2), 3),
    ("qkformer", MODELS["qkformer"], Layout(context=2, cut="rows"), 1),
    ("e_spikeformer", MODELS["e_spikeformer"], Layout(context=2, cut="rows"), 1),
    # Each has one row of every layer, of three on two or three ranks.
    ("seven rows", SMALL_VGG, Layout(context=2, cut="rows"), 1),
    ("three ranks", replace(SMALL_VGG, channels="8,8,P,16,P"), Layout(context=3, cut="rows"), 1),
]

Row = tuple[str, Model, Layout, int]


def _rows() -> Iterator[Row]:
    """(name, model, layout, size of a micro-batch)."""
    for name, layouts in (("unet", IN_STAGES), ("bundles", IN_STAGES), ("tied", TIED_IN_STAGES)):
        yield from ((name, MODELS[name], layout, SIZES[0]) for layout in layouts)
    # What neurons of counts have besides is seen where they meet other ranks.
    for kind, layout in product(("CountingLIF", "TernaryLIF"), LAYOUTS[3:]):
        yield kind, Own(kind=kind), layout, SIZES[0]
    for model in (WholeOutputs(), Signals(), Pooled(), Dropping()):
        yield type(model).__name__, model, Layout(tensor=2), SIZES[0]
    yield "Dropping", Dropping(), Layout(1, 2, 2), SIZES[0]
    # Three replicas with a micro-batch each, whose rows do not divide; two with one each: those that share weights have
    # equally many. Every second model, each on one of these layouts in turn.
    names = [name for name in MODELS if name != "e_spikeformer"]  # which has no exchange of its own there
    for number, name in enumerate(names[::2]):
        for layout in SHARED_WEIGHTS if name == "tied" else [SHARED_WEIGHTS[number % 3]]:
            yield name, MODELS[name], layout, 3 if layout.data == 2 else SIZES[0]
    yield from SHARED_SAMPLES


@pytest.fixture(scope="module")
def one_rank(ranks) -> Any:
    """(model, size of a micro-batch) -> its step on one rank."""
    return cache(lambda model, size: ranks(1, one_step, model, Layout(), torch.float64, size))


@pytest.mark.parametrize(
    ("model", "layout", "size"), [pytest.param(*row, id=f"{name}-{name_of(row[1])}") for name, *row in _rows()]
)
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
