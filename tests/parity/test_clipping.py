"""Three optimizer steps with clipping give the weights of SpikingJelly's model under torch's own clip_grad_norm_."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from megasnn.checkpoint.whole import load_globals_into
from megasnn.config.optimizer import OptimizerConfig
from megasnn.models.spikformer.spikingjelly_names import from_spikingjelly
from megasnn.optim import build_optimizer
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from tests.parity import spikingjelly_reference as reference
from tests.parity.ranks import Layout, RankStep, assemble, build_engine, record_step
from tests.parity.test_layouts import SIZES, TOLERANCE, error, name_of

STEPS = 3
CLIP = 0.2
# Decay aside, which ours spares norms and biases. The rate is large, so that a difference in one step shows.
OPTIONS = OptimizerConfig(lr=1e-2, weight_decay=0.0, clip_grad=CLIP)


@cache
def truth() -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """SpikingJelly's state before and after, and the norm of each step's gradient."""
    model = reference.build()
    images, labels = reference.data(sum(SIZES))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    betas = (OPTIONS.adam_beta1, OPTIONS.adam_beta2)
    optimizer = torch.optim.AdamW(model.parameters(), OPTIONS.lr, betas, OPTIONS.adam_eps, weight_decay=0.0)
    norms = []
    for _ in range(STEPS):
        reference.step(model, images, labels, SIZES)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return before, {name: value.clone() for name, value in model.state_dict().items()}, norms


def train(layout: Layout, weights: dict[str, Tensor], images: Tensor, labels: Tensor) -> list[RankStep]:
    """On every rank: what each step came to, with the parameters after it in the place of gradients."""
    state = initialize_model_parallel(layout.tensor, layout.pipeline)
    try:
        engine = build_engine(state, layout.schedule, torch.float64)
        load_globals_into(engine.tensors, from_spikingjelly(weights, reference.DIMS["depths"]), state.world.handle)
        optimizer, steps = build_optimizer(engine.tensors, OPTIONS), []
        for _ in range(STEPS):
            steps.append(record_step(engine, state, images, labels, SIZES[0]))
            engine.gradient_norm.clip(steps[-1].norm, CLIP)
            optimizer.step()
            for entry in engine.tensors:
                if entry.is_parameter:
                    shard, _ = steps[-1].gradients[entry.name]
                    steps[-1].gradients[entry.name] = (shard, entry.tensor.detach().clone())
        return steps
    finally:
        destroy_model_parallel()


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(data=2), Layout(tensor=2), Layout(pipeline=3), Layout(tensor=4), Layout(2, 2, 2, "zbv")],
    ids=name_of,
)
def test_three_clipped_steps_equal_torch(ranks, layout: Layout) -> None:
    before, after, norms = truth()
    assert min(norms) > 2 * CLIP, "nothing would be clipped"
    images, labels = reference.data(sum(SIZES))
    everyone = ranks(layout.world_size, train, layout, before, images, labels)
    for step, norm in enumerate(norms):
        assert all(steps[step].norm == pytest.approx(norm, rel=TOLERANCE) for steps in everyone)
    expected = from_spikingjelly(after, reference.DIMS["depths"])
    for name, value in assemble([steps[-1] for steps in everyone], "gradients").items():
        assert error(value, expected[name]) < TOLERANCE, name
