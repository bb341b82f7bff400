"""Ranks that share every micro-batch by rows of its images compute what one rank computes: in float64, to 1e-9
relative, with all spikes.

The suite takes each axis, schedule and option with each other once; `pytest -m matrix` takes all layouts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from spikingjelly.activation_based.model.spikformer import Spikformer as TheirSpikformer

from megasnn.config.optimizer import OptimizerConfig
from megasnn.kernels import NeuronSpec
from megasnn.models.model import Model
from megasnn.models.sew_resnet.model import SewResNet
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs
from tests.models.steps import assert_equal, take_steps
from tests.models.steps import one_step as step_of_model
from tests.parity import spikingjelly_reference as reference
from tests.parity import test_clipping as clipping
from tests.parity import test_context_samples as by_samples
from tests.parity import test_layouts as spikformer
from tests.parity import test_vgg as vgg
from tests.parity import vgg as vgg_ranks
from tests.parity.ranks import Layout, assemble
from tests.parity.spikingjelly_reference import from_spikingjelly
from tests.parity.test_context_samples import SIZES, spikformer_steps, truth
from tests.parity.test_layouts import TOLERANCE, error, name_of
from tests.parity.zoo import CASES as ZOO

CHOSEN = [
    Layout(context=2, cut="rows"),
    Layout(2, 1, 2, "zbv", context=2, cut="rows"),
    Layout(1, 2, 2, "1f1b", context=2, cut="rows"),
    Layout(1, 2, 1, context=4, cut="rows"),
]
EVERY = [replace(layout, cut="rows") for layout in by_samples.EVERY]


def _on(chosen: list[Layout]) -> Any:
    every = [*chosen, *(pytest.param(each, marks=pytest.mark.matrix) for each in EVERY if each not in chosen)]
    return pytest.mark.parametrize("layout", every, ids=name_of)


@_on(CHOSEN)
def test_spikformer(ranks, layout: Layout) -> None:
    spikformer.assert_equal_to_reference(spikformer_steps(ranks, layout), truth(layout.context))


@_on([Layout(2, 2, 1, context=2, cut="rows"), Layout(1, 1, 2, "zbv", context=4, cut="rows")])
def test_vgg_with_dropout(ranks, layout: Layout) -> None:
    sizes = SIZES[layout.context]
    expected = vgg_ranks.truth(vgg.DROPOUT, sizes)
    arguments = layout, vgg.DROPOUT, expected.state_before, torch.float64, "auto", sizes[0]
    vgg.assert_equal_to_reference(ranks(layout.world_size, vgg_ranks.one_step, *arguments), expected)


MORE = {
    "plif": (Layout(1, 2, 2, "zbv", context=2, cut="rows"), NeuronSpec(kind="plif")),
    "recompute": (Layout(2, 1, 2, "1f1b", weight=2, context=2, cut="rows", recompute="always"), NeuronSpec()),
    "scatters": (Layout(2, 1, 2, "zbv", weight=2, context=2, cut="rows", scatters=True), NeuronSpec(kind="plif")),
}


@pytest.mark.parametrize("name", ["plif", "recompute", pytest.param("scatters", marks=pytest.mark.matrix)])
def test_with_other_parts(ranks, name: str) -> None:
    """Learned time constants, forwards that are computed again, weights that replicas share."""
    by_samples.require_equal_to_one(ranks, *MORE[name])


@pytest.mark.parametrize(
    ("optimizer", "layout", "rows_have_owners"),
    [
        ("adamw", Layout(1, 2, 2, "zbv", context=2, cut="rows"), True),
        pytest.param("lamb", Layout(2, 1, 1, context=2, cut="rows"), True, marks=pytest.mark.matrix),
        pytest.param("sgd", Layout(context=2, cut="rows"), False, marks=pytest.mark.matrix),
    ],
)
def test_three_clipped_steps(ranks, optimizer: str, layout: Layout, rows_have_owners: bool) -> None:
    clipping._require_equal(ranks, optimizer, layout, rows_have_owners)


def _with_rows(model: Model) -> Model:
    """Of images so large that each layer has a row for each of two ranks."""
    return replace(model, image_size=64) if isinstance(model, SewResNet) else model


MODELS: dict[str, tuple[Model, int]] = {
    **{name: (replace(case.model, image_size=64) if "sew" in name else case.model, 2) for name, case in ZOO.items()},
    "seven rows": (VggDvs(channels="8,8,P,16", image_size=14, time_steps=2, num_classes=5), 2),
    "three ranks": (VggDvs(channels="8,8,P,16,P", image_size=14, time_steps=2, num_classes=5), 3),
}
IN_SUITE = ("qkformer", "seven rows", "three ranks")


@pytest.mark.parametrize(
    "name", [name if name in IN_SUITE else pytest.param(name, marks=pytest.mark.matrix) for name in MODELS]
)
def test_other_models(ranks, name: str) -> None:
    model, context = MODELS[name]
    layout = Layout(context=context, cut="rows")
    assert_equal(
        ranks(layout.world_size, step_of_model, model, layout, torch.float64, 1),
        ranks(1, step_of_model, model, Layout(), torch.float64, 1),
    )


def test_adamw_on_photographs(ranks, tmp_path) -> None:
    """At these sizes weights were once 8e-6 off: AdamW divides what a gradient lacks by the gradient's own size."""
    options = OptimizerConfig(lr=1e-3, weight_decay=0.0)
    sides = dict(patch_size=4, in_channels=3, num_classes=10, num_heads=4, mlp_ratio=4.0)
    model = Spikformer(embed_dim=64, depth=3, image_size=32, time_steps=4, **sides)
    torch.manual_seed(0)
    theirs = TheirSpikformer(T=4, img_size_h=32, img_size_w=32, embed_dims=64, depths=3, **sides).double()
    torch.save(from_spikingjelly(theirs.state_dict()), tmp_path / "weights.pt")
    batch = reference.photographs(4, 32), torch.arange(4)
    optimizer = torch.optim.AdamW(theirs.parameters(), options.lr, weight_decay=0.0)
    for _ in range(3):
        reference.step(theirs, *batch, [4])
        optimizer.step()
    expected = from_spikingjelly(theirs.state_dict())
    begun = batch, 3, tmp_path / "weights.pt", 4, options
    found, one = (
        assemble([steps[-1] for steps in ranks(layout.world_size, take_steps, model, layout, *begun)], "weights")
        for layout in (Layout(context=2, cut="rows"), Layout())
    )
    for name, value in found.items():
        assert error(value, one[name]) < TOLERANCE, name
        # Rounding of the smallest gradients, divided by their own size, leaves 2e-9 of single small weights.
        assert (value - expected[name]).abs().max() < TOLERANCE * expected[name].abs().max(), name
