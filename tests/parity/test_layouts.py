"""Every layout computes what SpikingJelly's own model computes: one step in float64, to 1e-9 relative."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.parity import spikingjelly_reference as reference
from tests.parity.ranks import Layout, RankStep, assemble, one_step
from tests.parity.spikingjelly_reference import from_spikingjelly

SIZES = [3, 3, 3, 2]  # the last micro-batch is smaller
TOLERANCE = 1e-9


def layouts() -> list[object]:
    """All that fit 8 ranks, with both schedules where there is a pipeline; the suite takes one of the two for each."""
    found: list[object] = []
    for data, tensor, pipeline in product((1, 2), (1, 2, 4), (1, 2, 4)):
        if data * tensor * pipeline <= 8:
            usual, other = ("1f1b", "gpipe") if (data * tensor) % 4 else ("gpipe", "1f1b")
            found.append(Layout(data, tensor, pipeline, usual))
            if pipeline > 1:
                found.append(pytest.param(Layout(data, tensor, pipeline, other), marks=pytest.mark.matrix))
    return found


def name_of(layout: Layout) -> str:
    weight = f"-wp{layout.weight}" if layout.weight > 1 else ""
    context = f"-cp{layout.context}{layout.cut}" if layout.context > 1 else ""
    return f"dp{layout.data}-tp{layout.tensor}-pp{layout.pipeline}{context}-{layout.schedule}{weight}"


@lru_cache(maxsize=1)
def truth() -> reference.ReferenceStep:
    images, labels = reference.data(sum(SIZES))
    return reference.step(reference.build(), images, labels, SIZES)


def by_our_names(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """SpikingJelly's tensors by our names; gradients lack the buffers, which the table wants too."""
    return from_spikingjelly({**truth().state_before, **values})


def error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of an element, relative to its size, or to a thousandth of the largest one where it is
    smaller: AdamW divides by an element's own size."""
    theirs = theirs.double()
    sizes = theirs.abs()
    floor = (sizes.max() * 1e-3).clamp_min(1e-300)
    return ((ours.double() - theirs).abs() / sizes.maximum(floor)).max().item()


def run_step(
    ranks, layout: Layout, *, dtype: torch.dtype = torch.float64, backend: str = "auto", **more
) -> list[RankStep]:
    images, labels = reference.data(sum(SIZES), dtype)
    weights = {k: v.to(dtype) if v.is_floating_point() else v for k, v in truth().state_before.items()}
    arguments = (layout, weights, images, labels, SIZES[0], dtype, backend, more.get("spec"), more.get("bounds"))
    return ranks(layout.world_size, one_step, *arguments)


def logits_in_order(steps: list[RankStep]) -> list[Tensor]:
    """Of the first tensor rank with the last chunk, replica by replica: global micro-batch order. The samples of those
    that share a micro-batch come together."""
    shares: dict[tuple[int, ...], list[list[Tensor]]] = {}
    for step in steps:
        pipeline, replica, _, tensor = step.rank
        if tensor == 0 and step.logits:
            shares.setdefault((pipeline, replica), []).append(step.logits)
    return [torch.cat(parts, dim=1) for of_ranks in shares.values() for parts in zip(*of_ranks, strict=True)]


def assert_equal_to_reference(steps: list[RankStep], expected: reference.ReferenceStep) -> None:
    assert all(step.loss == pytest.approx(expected.loss, rel=TOLERANCE) for step in steps)
    assert sum(step.spikes for step in steps) == expected.spikes, "spikes flipped"
    for ours, theirs in zip(logits_in_order(steps), expected.logits, strict=True):
        assert error(ours, theirs) < TOLERANCE
    gradients, buffers = assemble(steps, "gradients"), assemble(steps, "buffers")
    expected_gradients, expected_buffers = by_our_names(expected.gradients), by_our_names(expected.buffers)
    assert len(gradients) == len(expected.gradients)
    for name, value in gradients.items():
        assert error(value, expected_gradients[name]) < TOLERANCE, name
    for name, value in buffers.items():
        assert error(value, expected_buffers[name]) < TOLERANCE, name
    norm = torch.stack([g.norm() for g in expected.gradients.values()]).norm().item()
    assert all(step.norm == pytest.approx(norm, rel=TOLERANCE) for step in steps)


def test_the_reference_fires() -> None:
    """The comparison means something: neurons fire, some do not, and every parameter has a gradient."""
    assert 0.02 < truth().firing < 0.5
    assert all(gradient.abs().max() > 0 for gradient in truth().gradients.values())


@pytest.mark.parametrize("layout", layouts(), ids=name_of)
def test_layout_equals_spikingjelly(ranks, layout: Layout) -> None:
    assert_equal_to_reference(run_step(ranks, layout), truth())


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 2, 2)], ids=name_of)
def test_plain_neurons_equal_spikingjelly(ranks, layout: Layout) -> None:
    assert_equal_to_reference(run_step(ranks, layout, backend="torch"), truth())


@pytest.mark.parametrize("cuts", [(0, 5), (3, 3), (1, 10), (9, 10)])
def test_any_cut_including_empty_stages(ranks, cuts: tuple[int, int]) -> None:
    first, second = cuts
    bounds = [range(0, first), range(first, second), range(second, 10)]
    steps = run_step(ranks, Layout(pipeline=3), bounds=bounds)
    assert_equal_to_reference(steps, truth())


def test_tensor_parallel_float32_differs_by_rounding_only(ranks) -> None:
    """In float32 a rounding difference may flip a spike; here none does, and gradients agree to float32's precision."""
    one = assemble(run_step(ranks, Layout(), dtype=torch.float32), "gradients")
    two = assemble(run_step(ranks, Layout(tensor=2), dtype=torch.float32), "gradients")
    assert max(error(two[name], one[name]) for name in one) < 1e-3
