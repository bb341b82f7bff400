"""Ranks that share every micro-batch, by samples or by rows of its images, compute what one rank computes: in float64,
to 1e-9 relative, with all spikes; and samples tell each other inside of layers statistics of norms alone.

The suite takes each axis, schedule and option with each other once; `pytest -m matrix` takes all layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from spikingjelly.activation_based.model.spikformer import Spikformer as TheirSpikformer

from megasnn.config.optimizer import OptimizerConfig
from megasnn.grid import ContextCut
from megasnn.kernels import NeuronSpec
from megasnn.layers.shape_inference import calls_of
from megasnn.models.model import Model
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.parallel.traffic import Traffic, statistics
from megasnn.parallel_state import destroy_model_parallel
from tests.models.steps import assert_equal, take_steps
from tests.models.steps import one_step as step_of_model
from tests.parity import spikingjelly_reference as reference
from tests.parity import test_clipping as clipping
from tests.parity import test_layouts as spikformer
from tests.parity import test_vgg as vgg
from tests.parity import vgg as vgg_ranks
from tests.parity.networks import MODELS
from tests.parity.ranks import Layout, RankStep, assemble, build_engine, join, one_step, record_step
from tests.parity.spikingjelly_reference import from_spikingjelly
from tests.parity.test_layouts import TOLERANCE, error, name_of
from tests.parity.zoo import CASES as ZOO

SAMPLES = sum(spikformer.SIZES)
SIZES = {2: (3, 3, 3, 2), 4: (6, 5)}
"""Of micro-batches, by the number of ranks that share each: none has equally many samples of all of them."""

CUTS: tuple[ContextCut, ...] = ("samples", "rows")
EVERY = [
    Layout(data, tensor, pipeline, schedule, context=context)
    for context, data, tensor, pipeline in product((2, 4), (1, 2), (1, 2), (1, 2))
    if context * data * tensor * pipeline <= 8
    for schedule in (("1f1b", "zbv") if pipeline > 1 else ("1f1b",))
]
CHOSEN = [
    Layout(context=2),
    Layout(2, 1, 2, "zbv", context=2),
    Layout(1, 2, 2, "1f1b", context=2),
    Layout(1, 2, 1, context=4),
]
OF_VGG = [Layout(2, 2, 1, context=2), Layout(1, 1, 2, "zbv", context=4)]


def _on(chosen: list[Layout]) -> Any:
    every = [
        pytest.param(replace(each, cut=cut), marks=() if each in chosen else pytest.mark.matrix)
        for cut, each in product(CUTS, EVERY)
    ]
    return pytest.mark.parametrize("layout", every, ids=lambda layout: name_of(layout))


@cache
def truth(context: int) -> reference.ReferenceStep:
    return reference.step(reference.build(), *reference.data(SAMPLES), list(SIZES[context]))


def spikformer_steps(ranks, layout: Layout, spec: NeuronSpec | None = None) -> list[RankStep]:
    arguments = (
        layout, None if spec else truth(layout.context).state_before, *reference.data(SAMPLES),
        SIZES[layout.context][0], torch.float64, "auto", spec,
    )  # fmt: skip
    return ranks(layout.world_size, one_step, *arguments)


@_on(CHOSEN)
def test_spikformer(ranks, layout: Layout) -> None:
    spikformer.assert_equal_to_reference(spikformer_steps(ranks, layout), truth(layout.context))


@_on(OF_VGG)
def test_vgg_with_dropout(ranks, layout: Layout) -> None:
    sizes = SIZES[layout.context]
    expected = vgg_ranks.truth(vgg.DROPOUT, sizes)
    arguments = layout, vgg.DROPOUT, expected.state_before, torch.float64, "auto", sizes[0]
    vgg.assert_equal_to_reference(ranks(layout.world_size, vgg_ranks.one_step, *arguments), expected)


MORE = {
    "plif": (Layout(1, 2, 2, "zbv", context=2), NeuronSpec(kind="plif")),
    "recompute": (Layout(2, 1, 2, "1f1b", weight=2, context=2, recompute="always"), NeuronSpec()),
    "scatters": (Layout(2, 1, 2, "zbv", weight=2, context=2, scatters=True), NeuronSpec(kind="plif")),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["plif", "recompute", pytest.param("scatters", marks=pytest.mark.matrix)])
def test_with_other_parts(ranks, name: str, cut: ContextCut) -> None:
    """Learned time constants, forwards that are computed again, weights that replicas share."""
    layout, spec = MORE[name]
    require_equal_to_one(ranks, replace(layout, cut=cut), spec)


def require_equal_to_one(ranks, layout: Layout, spec: NeuronSpec) -> None:
    """Against a step of one rank."""
    found, (one,) = spikformer_steps(ranks, layout, spec), _one(ranks, spec)
    assert all(step.loss == pytest.approx(one.loss, rel=TOLERANCE) for step in found)
    assert all(step.norm == pytest.approx(one.norm, rel=TOLERANCE) for step in found)
    assert sum(step.spikes for step in found) == one.spikes
    for what in ("gradients", "buffers"):
        expected, ours = assemble([one], what), assemble(found, what)
        assert expected.keys() == ours.keys()
        for each, value in expected.items():
            assert error(ours[each], value) < TOLERANCE, each


def _one(ranks, spec: NeuronSpec) -> list[RankStep]:
    arguments = None, *reference.data(SAMPLES), SIZES[2][0], torch.float64, "auto", spec
    return ranks(1, one_step, Layout(), *arguments)


THREE_STEPS = [
    ("adamw", Layout(1, 2, 2, "zbv", context=2), True),
    ("lamb", Layout(2, 1, 1, context=2), True),
    ("adamw", Layout(1, 2, 2, "zbv", context=2, cut="rows"), True),
    ("lamb", Layout(4, 1, 1, weight=2, context=2), True),
    ("adamw", Layout(2, 2, 1, weight=2, context=2), False),
    ("sgd", Layout(context=2), False),
    ("lamb", Layout(2, 1, 1, context=2, cut="rows"), True),
    ("sgd", Layout(context=2, cut="rows"), False),
]


@pytest.mark.parametrize(
    ("optimizer", "layout", "rows_have_owners"),
    [
        pytest.param(
            *each, marks=() if number < 3 else pytest.mark.matrix, id=f"{each[0]}-{name_of(each[1])}-{each[2]}"
        )
        for number, each in enumerate(THREE_STEPS)
    ],
)
def test_three_clipped_steps(ranks, optimizer: str, layout: Layout, rows_have_owners: bool) -> None:
    """Also where rows have owners, of which there are as many as ranks hold the same."""
    clipping.require_equal(ranks, optimizer, layout, rows_have_owners)


# By name: a model, the ranks that share its rows, of which each has one of every layer, and whether the suite takes it.
BY_ROWS: dict[str, tuple[Model, int, bool]] = {
    name: (replace(case.model, image_size=64) if "sew" in name else case.model, 2, name == "qkformer")
    for name, case in ZOO.items()
} | {
    "seven rows": (VggDvs(channels="8,8,P,16", image_size=14, time_steps=2, num_classes=5), 2, True),
    "three ranks": (VggDvs(channels="8,8,P,16,P", image_size=14, time_steps=2, num_classes=5), 3, True),
}
BY_SAMPLES = {
    "bundles": Layout(context=2),
    "qkformer": Layout(1, 1, 2, "zbv", context=2),
    "tied": Layout(1, 1, 2, context=2),
}


def _networks() -> Iterator[Any]:
    for name, model in MODELS.items():
        layout = BY_SAMPLES.get(name, Layout(1, 2 if name in ZOO else 1, 1, context=2))
        marks = () if name in BY_SAMPLES else pytest.mark.matrix
        yield pytest.param(model, layout, 3, id=f"{name}-{name_of(layout)}", marks=marks)
    for name, (model, context, usual) in BY_ROWS.items():
        marks = () if usual else pytest.mark.matrix
        yield pytest.param(model, Layout(context=context, cut="rows"), 1, id=f"{name}-rows", marks=marks)


@pytest.mark.parametrize(("model", "layout", "micro_batch"), [*_networks()])
def test_other_models(ranks, model: Model, layout: Layout, micro_batch: int) -> None:
    found, one = (
        ranks(each.world_size, step_of_model, model, each, torch.float64, micro_batch) for each in (layout, Layout())
    )
    assert_equal(found, one)


def traffic_of_a_step(layout: Layout) -> tuple[dict[tuple[str, str, str], Traffic], int, int]:
    """What this rank received in a step, by group, operation and direction; and channels and calls of its norms."""
    state = join(layout)
    try:
        engine = build_engine(state, layout.schedule, torch.float32, layout=layout)
        images, labels = reference.data(SAMPLES, torch.float32)
        with statistics.counting():
            statistics.reset()
            record_step(engine, state, images, labels, SIZES[layout.context][0])
            found = dict(statistics.read())
            statistics.reset()
        calls = sum(calls_of(norm) for norm in engine.norms)
        channels = sum(calls_of(norm) * norm.running_mean.numel() for norm in engine.norms)
        return found, channels, calls
    finally:
        destroy_model_parallel()


@pytest.mark.parametrize("layout", [Layout(context=2), pytest.param(Layout(context=4), marks=pytest.mark.matrix)])
def test_statistics_are_all_that_travels_inside_of_layers(ranks, layout: Layout) -> None:
    """To the byte: mean, variance and a count forward, three sums backward, in double precision."""
    for found, channels, calls in ranks(layout.world_size, traffic_of_a_step, layout):
        others, micro_batches = layout.context - 1, len(SIZES[layout.context])
        of_context = {key[1:]: (each.calls, each.bytes) for key, each in found.items() if key[0] == "cp"}
        assert of_context == {
            ("all_gather", "forward"): (micro_batches * calls, micro_batches * others * 8 * (2 * channels + calls)),
            ("all_gather", "backward"): (micro_batches * calls, micro_batches * others * 8 * 3 * channels),
        }
        assert {key[0] for key in found} == {"cp", "dp", "world"}, "gradients, and a step's sums"


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
