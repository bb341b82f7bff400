"""One step of any small model on every rank of a layout."""

from __future__ import annotations

import torch
from torch import Tensor

from megasnn.checkpoint import load_globals_into
from megasnn.engine.distributed_model import DistributedModel
from megasnn.layers import BuildContext
from megasnn.models.building import describe
from megasnn.models.model import Model
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.schedule import plan_schedule
from megasnn.schedule.partition import balanced_bounds
from tests.parity.ranks import Layout, RankStep, assemble, record_step
from tests.parity.test_layouts import error

SIZES = [2, 2, 1]
LAYOUTS = [
    Layout(tensor=2),
    Layout(pipeline=2),
    Layout(2, 1, 1),
    Layout(1, 1, 4, "gpipe"),
    Layout(2, 2, 2, "zbv"),
]


def images(model: Model) -> tuple[Tensor, Tensor]:
    """A global batch with labels."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(sum(SIZES), *model.input_shape, generator=generator, dtype=torch.float64)
    return values, torch.randint(0, model.num_classes, (sum(SIZES),), generator=generator)


def one_step(
    model: Model,
    layout: Layout,
    dtype: torch.dtype = torch.float64,
    weights: dict[str, Tensor] | None = None,
    batch: tuple[Tensor, Tensor] | None = None,
) -> RankStep:
    """On every rank of an initialised world.

    Args:
        weights: to start from, whole; the keyed initial values are those without.
        batch: images and labels; by default `images` of the model.
    """
    state = initialize_model_parallel(layout.tensor, layout.pipeline)
    try:
        described = describe(model)
        plan = plan_schedule(layout.schedule, layout.pipeline, layout.chunks)
        bounds = balanced_bounds([1.0] * len(described.layers), len(plan.placement), allow_empty=True)
        context = BuildContext(state.tensor, dtype, dtype)
        x, labels = batch or images(model)
        distributed = DistributedModel(described, state, context, bounds, plan)
        if weights is not None:
            load_globals_into(distributed.tensors, weights, state.world.handle)
        return record_step(distributed, state, x.to(dtype), labels, SIZES[0])
    finally:
        destroy_model_parallel()


def assert_equal(steps: list[RankStep], one: list[RankStep]) -> None:
    """Loss, spikes, every gradient and buffer, to 1e-9 relative."""
    assert all(abs(step.loss - one[0].loss) < 1e-9 * abs(one[0].loss) for step in steps)
    assert sum(step.spikes for step in steps) == one[0].spikes, "spikes flipped"
    for what in ("gradients", "buffers"):
        expected, found = assemble(one, what), assemble(steps, what)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            # A bias before a norm has no gradient but what rounding leaves of it.
            assert error(found[name], value) < 1e-9 or value.abs().max() < 1e-12, name
