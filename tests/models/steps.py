"""Steps of any small model on every rank of a layout."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megasnn.checkpoint.load import load_globals_into
from megasnn.config.optimizer import OptimizerConfig
from megasnn.grid import HOLDING_AXES
from megasnn.models.build import describe
from megasnn.models.model import Model
from megasnn.optim.build import build_optimizer
from megasnn.parallel_state import destroy_model_parallel
from megasnn.schedule import plan_schedule
from tests.parity.ranks import (
    Layout,
    RankStep,
    assemble,
    distributed,
    even_bounds,
    gathering,
    join,
    record_step,
    weights_of,
)
from tests.parity.test_layouts import error

SIZES = [2, 2, 1]
LAYOUTS = [
    Layout(tensor=2),
    Layout(pipeline=2),
    Layout(2, 1, 1),
    Layout(1, 1, 4, "gpipe"),
    Layout(2, 2, 2, "zbv"),
]
SGD = OptimizerConfig("sgd", lr=0.05, weight_decay=0.0)


def images(model: Model, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """A global batch with labels."""
    generator = torch.Generator().manual_seed(7)
    values = scale * torch.randn(sum(SIZES), *model.input_shape, generator=generator, dtype=torch.float64)
    return values, torch.randint(0, model.num_classes, (sum(SIZES),), generator=generator)


def take_steps(
    model: Model,
    layout: Layout,
    batch: tuple[Tensor, Tensor],
    count: int,
    weights: Path | None = None,
    micro_batch_size: int = SIZES[0],
    options: OptimizerConfig = SGD,
) -> list[RankStep]:
    """Steps on one batch, in its precision, on every rank of an initialised world. A single one is up to the gradients.

    Args:
        weights: a file of torch's with those to begin at, by global names, which all ranks read from one memory;
            without it, steps begin at the keyed initial values.
    """
    state = join(layout)
    try:
        described, dtype = describe(model), batch[0].dtype
        plan = plan_schedule(layout.schedule, layout.pipeline, layout.chunks)
        bounds = even_bounds(len(described.layers), len(plan.placement))
        context = layout.build_context(state, dtype)
        plan = gathering(plan, described, bounds, context, layout)
        engine = distributed(described, state, context, bounds, plan)
        if weights is not None:
            values = torch.load(weights, mmap=True, weights_only=True)
            load_globals_into(engine.tensors, values, state.world.handle)
        optimizer = build_optimizer(engine.owned, options, {axis: state.group(axis) for axis in HOLDING_AXES})
        steps = list[RankStep]()
        for _ in range(count):
            steps.append(record_step(engine, state, *batch, micro_batch_size))
            if count > 1:
                optimizer.step()
                engine.ties.refresh()
                steps[-1].weights = weights_of(engine)
        return steps
    finally:
        destroy_model_parallel()


def one_step(
    model: Model, layout: Layout, dtype: torch.dtype = torch.float64, micro_batch_size: int = SIZES[0]
) -> RankStep:
    """From the keyed initial values."""
    x, labels = images(model)
    (step,) = take_steps(model, layout, (x.to(dtype), labels), 1, micro_batch_size=micro_batch_size)
    return step


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
