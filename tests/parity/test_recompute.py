"""Layer by layer, and with forwards that are computed again, a step has the same bits as without: loss, gradients,
running statistics, spikes that are told of, samples that are right, and what tensor parallel ranks send each other.

The suite takes each schedule, model and size once or twice; `pytest -m matrix` takes all together.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from megasnn.batching import micro_batch_sizes, micro_batches_of
from megasnn.engine.model import DistributedModel
from megasnn.layers import BuildContext
from megasnn.models.build import describe
from megasnn.models.description import ModelDescription
from megasnn.models.model import Model
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.parallel.traffic import Traffic, statistics
from megasnn.parallel_state import ParallelState, destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.microbatch_state import MicroBatchInput
from megasnn.schedule import plan_schedule
from megasnn.schedule.passes import RECOMPUTE
from tests.gradients import evaluated, forward_backward, merge_statistics
from tests.models.networks import Bundles, Tied, UNet
from tests.parity.networks import CalledAgain
from tests.parity.ranks import Layout, distributed, even_bounds, model_config

SAMPLES, MICRO_BATCH, SEED = 7, 2, 5
MODELS: dict[str, Model] = {
    "spikformer": model_config(),
    "vgg": VggDvs(channels="8,8,P,32,8,P,16,P", image_size=16, time_steps=3, num_classes=5),
    "unet": UNet(),
    "bundles": Bundles(),
    "tied": Tied(),
    "called-again": CalledAgain(),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "zb2p", "zbv", "v-half", "v-min", "auto")


@dataclass
class Step:
    """What a rank holds after a step, tensors as digests by name; traffic is that of its tensor parallel group."""

    loss: float
    norm: float
    correct: float
    evaluated: list[float]
    spikes: list[int]
    tensors: dict[str, str]
    traffic: dict[tuple[str, str, str], Traffic]


@cache
def _described(name: str) -> ModelDescription:
    return describe(MODELS[name])


def _step(name: str, layout: Layout, recompute: str | None, state: ParallelState) -> Step:
    """With `recompute`, layer by layer; without it, chunk by chunk."""
    model = _described(name)
    plan = plan_schedule(layout.schedule, layout.pipeline, layout.chunks)
    bounds = even_bounds(len(model.layers), len(plan.placement))
    if recompute is not None:
        plan = plan.in_units(bounds, recompute)
    engine = distributed(model, state, BuildContext(state.tp, seed=SEED), bounds, plan)
    spikes: list[int] = []
    for _, neuron in engine.neurons():
        neuron.observer = lambda fired: spikes.append(int(fired.sum()))
    batches = _micro_batches(engine, state)
    with statistics.counting():
        statistics.reset()
        loss = forward_backward(engine, batches, SAMPLES)
        traffic = {key: each for key, each in statistics.read().items() if key[0] == "tp"}
    merge_statistics(engine, len(batches))
    tensors = [(e.name, e.tensor if e.tensor.grad is None else e.tensor.grad) for e in engine.tensors]
    correct, seen = engine.correct, sorted(spikes)
    sums = evaluated(engine, batches)
    return Step(loss, engine.norm, correct, sums, seen, {name: _digest(value) for name, value in tensors}, traffic)


def _micro_batches(engine: DistributedModel, state: ParallelState) -> list[MicroBatchInput]:
    generator = torch.Generator().manual_seed(3)
    images = 2 * torch.randn(SAMPLES, *engine.description.input_shape, generator=generator)
    labels = torch.randint(0, engine.description.num_classes, (SAMPLES,), generator=generator)
    sizes = micro_batch_sizes(SAMPLES, MICRO_BATCH)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        MicroBatchInput(
            images[starts[m] : starts[m] + sizes[m]] if engine.takes_images else None,
            labels[starts[m] : starts[m] + sizes[m]] if engine.gives_logits else None,
            sizes[m],
            range(starts[m], starts[m] + sizes[m]),
        )
        for m in micro_batches_of(len(sizes), state.dp.size, state.dp.rank)
    ]


def _digest(values: Tensor) -> str:
    return hashlib.sha1(values.detach().numpy().tobytes()).hexdigest()


def _both(name: str, layout: Layout, modes: list[str]) -> list[Step]:
    """A step as it is, and then one in each mode."""
    state = initialize_model_parallel(tp=layout.tensor, pp=layout.pipeline)
    try:
        return [_step(name, layout, recompute, state) for recompute in (None, *modes)]
    finally:
        destroy_model_parallel()


CASES = [
    *((name, Layout(), [*RECOMPUTE]) for name in MODELS),
    ("spikformer", Layout(tensor=2), ["always"]),
    ("vgg", Layout(tensor=2), ["except-last"]),
    ("called-again", Layout(tensor=2), ["always"]),
    ("spikformer", Layout(data=2), ["always"]),
    ("tied", Layout(1, 1, 2, "zbv"), ["always"]),
    ("bundles", Layout(1, 1, 2, "interleaved"), ["except-last"]),
    ("vgg", Layout(1, 1, 2, "zb1p"), ["never", "always"]),
    ("unet", Layout(1, 1, 2, "gpipe"), ["always"]),
    ("vgg", Layout(1, 2, 2, "1f1b"), ["always"]),
    ("spikformer", Layout(2, 1, 2, "v-half"), ["always"]),
]
GRIDS = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 1, 4), (2, 2, 2)]
EVERY = [
    (name, Layout(*grid, schedule), [*RECOMPUTE])
    for name, grid, schedule in product(MODELS, GRIDS, SCHEDULES)
    if (grid[2] > 1 or schedule == "1f1b") and not (name in ("unet", "bundles", "tied") and grid[1] > 1)
]


def _name(case: tuple[str, Layout, list[str]]) -> str:
    name, each, _ = case
    return f"{name}-d{each.data}t{each.tensor}p{each.pipeline}-{each.schedule}"


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(each, marks=pytest.mark.matrix) for each in EVERY)], ids=_name)
def test_no_bit_changes(ranks, case: tuple[str, Layout, list[str]]) -> None:
    name, layout, modes = case
    found = ranks(layout.world_size, _both, name, layout, modes)
    assert any(sum(plain.spikes) for plain, *_ in found), "some neurons fire"
    for plain, *others in found:
        assert layout.tensor == 1 or plain.traffic
        for mode, step in zip(modes, others, strict=True):
            assert step == plain, mode
