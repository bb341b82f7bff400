"""The VGG on every layout computes what SpikingJelly's computes: one step in float64, to 1e-9 relative."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from tests.parity import spikingjelly_reference as reference
from tests.parity import vgg
from tests.parity.ranks import Layout, RankStep, assemble
from tests.parity.test_layouts import TOLERANCE, error, logits_in_order, name_of
from tests.parity.vgg import CONFIG, Variant

DROPOUT = Variant(dropout=0.3)
LAYOUTS = [
    Layout(),
    Layout(1, 4, 1),
    Layout(1, 2, 3),
    Layout(2, 1, 3),
    Layout(1, 1, 4, "interleaved", 2),
    Layout(2, 2, 2, "zbv"),
]

truth = cache(vgg.truth)


def run_step(ranks, layout: Layout, variant: Variant, **options) -> list[RankStep]:
    dtype = options.get("dtype", torch.float64)
    weights = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in truth(variant).state_before.items()
    }
    return ranks(layout.world_size, vgg.one_step, layout, variant, weights, dtype, options.get("backend", "auto"))


def by_our_names(expected: reference.ReferenceStep, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients lack the buffers, which the table of names wants too."""
    return CONFIG.from_spikingjelly({**expected.state_before, **values})


def assert_equal_to_reference(steps: list[RankStep], expected: reference.ReferenceStep) -> None:
    assert all(step.loss == pytest.approx(expected.loss, rel=TOLERANCE) for step in steps)
    assert sum(step.spikes for step in steps) == expected.spikes, "spikes flipped"
    for ours, theirs in zip(logits_in_order(steps), expected.logits, strict=True):
        assert error(ours, theirs) < TOLERANCE
    gradients, buffers = assemble(steps, "gradients"), assemble(steps, "buffers")
    expected_gradients = by_our_names(expected, expected.gradients)
    assert len(gradients) == len(expected.gradients)
    for name, value in gradients.items():
        if name.endswith("conv.bias"):  # cancels against the norm's mean: theirs is what rounding left of zero
            assert value.abs().max() == 0 and expected_gradients[name].abs().max() < 1e-12, name
        else:
            assert error(value, expected_gradients[name]) < TOLERANCE, name
    for name, value in buffers.items():
        assert error(value, by_our_names(expected, expected.buffers)[name]) < TOLERANCE, name
    norm = torch.stack([g.norm() for g in expected.gradients.values()]).norm().item()
    assert all(step.norm == pytest.approx(norm, rel=TOLERANCE) for step in steps)


@pytest.mark.parametrize("variant", [Variant(), DROPOUT], ids=["plain", "dropout"])
def test_the_reference_fires(variant: Variant) -> None:
    """The comparison means something: neurons fire, some do not, every weight has a gradient, dropout changes it."""
    expected = truth(variant)
    assert 0.02 < expected.firing < 0.5
    assert all(gradient.abs().max() > 0 for gradient in expected.gradients.values())
    assert variant.dropout == 0 or abs(expected.loss - truth(Variant()).loss) > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_layout_equals_spikingjelly_with_dropout(ranks, layout: Layout) -> None:
    assert_equal_to_reference(run_step(ranks, layout, DROPOUT), truth(DROPOUT))


def test_a_full_grid_equals_spikingjelly_without_dropout(ranks) -> None:
    assert_equal_to_reference(run_step(ranks, Layout(2, 2, 2), Variant()), truth(Variant()))


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(2, 1, 2), Layout(1, 2, 2, "zbv")], ids=name_of)
def test_drop_path_leaves_out_the_same_samples(ranks, layout: Layout) -> None:
    variant = Variant(dropout=0.3, drop_path=0.4)
    assert abs(truth(variant).loss - truth(DROPOUT).loss) > 1e-3
    assert_equal_to_reference(run_step(ranks, layout, variant), truth(variant))


@pytest.mark.parametrize("loss", ["tet", "mse"])
@pytest.mark.parametrize("layout", [Layout(), Layout(2, 2, 2)], ids=name_of)
def test_losses(ranks, layout: Layout, loss: str) -> None:
    variant = Variant(dropout=0.3, loss=loss)
    assert_equal_to_reference(run_step(ranks, layout, variant), truth(variant))


def test_plain_neurons_equal_spikingjelly(ranks) -> None:
    assert_equal_to_reference(run_step(ranks, Layout(1, 2, 2), DROPOUT, backend="torch"), truth(DROPOUT))


def test_pipeline_sizes_agree_bit_for_bit_in_float32(ranks) -> None:
    one = run_step(ranks, Layout(), DROPOUT, dtype=torch.float32)
    gradients, buffers = assemble(one, "gradients"), assemble(one, "buffers")
    schedules = [Layout(pipeline=stages, schedule=name) for stages, name in ((2, "zbv"), (2, "zb1p"), (3, "v-min"))]
    for layout in (Layout(pipeline=2), Layout(pipeline=4, schedule="gpipe"), Layout(pipeline=6), *schedules):
        steps = run_step(ranks, layout, DROPOUT, dtype=torch.float32)
        assert {step.loss for step in steps} == {one[0].loss}
        for name, value in assemble(steps, "gradients").items():
            assert torch.equal(value, gradients[name]), f"{name} on {name_of(layout)}"
        for name, value in assemble(steps, "buffers").items():
            assert torch.equal(value, buffers[name]), f"{name} on {name_of(layout)}"
