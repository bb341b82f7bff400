"""The executor runs whatever the validator lets through: random orders on random placements, with random delays.

The suite takes half of the drawn schedules, `pytest -m matrix` the others.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from megasnn.layers import BuildContext, ConvNormNeuron, MeanLinear, ParallelBatchNorm
from megasnn.layers.init import trunc_normal
from megasnn.layers.layer import Layer, layer
from megasnn.models.build import describe_model
from megasnn.models.description import ModelDescription
from megasnn.models.model import Model
from megasnn.parallel.gradient_buckets import GradientBuckets
from megasnn.parallel_state import Group, ParallelState, destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.chunk import build_chunks
from megasnn.pipeline.executor import PipelineExecutor, PreparedOrder
from megasnn.pipeline.microbatch_state import MicroBatchInput
from megasnn.pipeline.p2p import Boundaries, Transfers
from megasnn.schedule import Action, Kind, Schedule, generate, validate_schedule
from megasnn.schedule.passes import insert_gradient_reduction, insert_transfers
from tests.distributed.whole import digests
from tests.distributed.whole import random as random_tensor

CHANNELS, CLASSES, SIDE, STEPS = 8, 3, 3, 2
MOST_MICRO_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Row(Model):
    """Four units and a head."""

    image_size: int = SIDE
    time_steps: int = STEPS
    num_classes: int = CLASSES

    def layers(self) -> Iterable[Layer]:
        for index, inputs in enumerate([3, CHANNELS, CHANNELS, CHANNELS]):
            yield layer(f"unit.{index}", ConvNormNeuron(inputs, CHANNELS, initialise=trunc_normal), layer_group="unit")
        yield layer("head", MeanLinear(CHANNELS, CLASSES))


def _model() -> ModelDescription:
    return describe_model(Row())


def random_schedule(seed: int, ranks: int) -> Schedule:
    """Chunks on random ranks; what a rank does next is drawn from all that it could do."""
    draw = random.Random(seed)
    chunks, micro_batches = draw.randint(ranks, 2 * ranks + 1), draw.randint(1, MOST_MICRO_BATCHES)
    placement = [*range(ranks), *(draw.randrange(ranks) for _ in range(chunks - ranks))]
    draw.shuffle(placement)
    split = draw.random()
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    done = {(chunk, stage): 0 for chunk in range(chunks) for stage in "FIW"}
    while any(count < micro_batches for count in done.values()):
        chunk, stage = draw.choice([step for step in done if _possible(step, done, chunks, micro_batches)])
        m = done[chunk, stage]
        whole = stage == "I" and done[chunk, "W"] == m and draw.random() > split
        kind = Kind.BACKWARD if whole else Kind(stage)
        rows[placement[chunk]].append(Action(chunk, kind, m))
        for advanced in "IW" if whole else stage:
            done[chunk, advanced] += 1
    orders = tuple(map(tuple, rows))
    schedule = Schedule(f"random {seed}", tuple(placement), micro_batches, orders)
    return insert_gradient_reduction(insert_transfers(schedule))


def _possible(step: tuple[int, str], done: dict[tuple[int, str], int], chunks: int, micro_batches: int) -> bool:
    chunk, stage = step
    before = {
        "F": done[chunk - 1, "F"] if chunk else micro_batches,
        "I": done[chunk + 1, "I"] if chunk + 1 < chunks else done[chunk, "F"],
        "W": done[chunk, "I"],
    }[stage]
    return done[step] < before


class Delayed(PipelineExecutor):
    """A rank is held up after some of its actions, now and then for longer.

    Attributes:
        done: the actions, in the order in which they were executed.
        added: gradients of weights that were added in the current action.
    """

    draw: random.Random
    done: list[Action]
    added = 0

    def count(self, parameter: Tensor) -> None:
        self.added += 1

    def prepared(self, schedule: Schedule) -> PreparedOrder:
        return [(action, [partial(self._hold_up, action), *works]) for action, works in super().prepared(schedule)]

    def _hold_up(self, action: Action) -> None:
        if self.done:
            assert not self.added or self.done[-1].kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT), self.done[-1]
        self.added = 0
        self.done.append(action)
        if self.draw.random() < 0.3:
            time.sleep(0.02 if self.draw.random() < 0.03 else self.draw.random() / 1000)


def _loss(logits: Tensor, labels: Tensor, is_recomputation: bool) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.mean(0), labels, reduction="sum")


def _step(schedule: Schedule, state: ParallelState, seed: int) -> tuple[float, dict[str, str]]:
    """Loss, and a digest of each gradient and of what each norm recorded."""
    model, chunks = _model(), len(schedule.placement)
    # The last layers share a chunk where there are more layers than chunks; with fewer, some chunks are empty.
    ends = [min(chunk + 1, len(model.layers)) for chunk in range(chunks - 1)] + [len(model.layers)]
    bounds = [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    mine = build_chunks(model, bounds, schedule.segments_of(state.pp.rank), BuildContext(), state.device, 0)
    layers = [pair for chunk in mine.values() for pair in chunk.named_layers()]
    modules = [pair for name, layer in layers for pair in layer.named_modules(prefix=name)]
    norms = {name: module for name, module in modules if isinstance(module, ParallelBatchNorm)}
    for norm in norms.values():
        norm.record_statistics()
    boundaries = Boundaries(model, BuildContext(), model.build(BuildContext()))
    transfers = Transfers(mine, schedule.placement, state, boundaries)
    executor = Delayed(mine, state, transfers, _loss, GradientBuckets([], Group("dp"), Group("tp")))
    executor.draw, executor.done = random.Random(f"{seed} {state.rank}"), []
    for chunk in mine.values():
        chunk.weight_gradients.report_to(executor.count)
    images = random_tensor(MOST_MICRO_BATCHES, STEPS, 2, 3, SIDE, SIDE, dtype=torch.float32)
    labels = torch.tensor([0, 2])
    batches = [
        MicroBatchInput(images[m] if 0 in mine else None, labels if chunks - 1 in mine else None, 2)
        for m in range(schedule.micro_batches)
    ]
    loss = executor.run(schedule, batches)
    assert executor.done == [*schedule.actions[state.pp.rank]]
    for link in transfers.links.values():
        assert link.outward.handle is not link.inward.handle, "no group carries both ways between two ranks"
    tensors = [e for chunk in mine.values() for e in chunk.sharded_tensors() if e.is_parameter]
    assert all(e.tensor.grad is not None for e in tensors)
    values = {e.name: e.tensor.grad for e in tensors}
    for name, norm in norms.items():
        values |= {f"{name} {m}": mean for m, (mean, _, _) in enumerate(norm.pending)}
    return float(loss), digests(values)


def _steps(seeds: range) -> list[tuple[float, dict[str, str]]]:
    world_size = torch.distributed.get_world_size()
    state = initialize_model_parallel(pp=world_size)
    try:
        return [_step(random_schedule(seed, world_size), state, seed) for seed in seeds]
    finally:
        destroy_model_parallel()


def _one_rank() -> dict[int, tuple[float, dict[str, str]]]:
    state = initialize_model_parallel()
    try:
        return {m: _step(generate("1f1b", 1, m), state, 0) for m in range(1, MOST_MICRO_BATCHES + 1)}
    finally:
        destroy_model_parallel()


SEEDS = {2: (range(40), range(40, 90)), 3: (range(90, 120), range(120, 160)), 4: (range(160, 180), range(180, 200))}


@pytest.mark.parametrize(
    "size, seeds",
    [
        *((size, some) for size, (some, _) in SEEDS.items()),
        *(pytest.param(size, others, marks=pytest.mark.matrix) for size, (_, others) in SEEDS.items()),
    ],
)
def test_random_schedules_with_random_delays(ranks, size, seeds) -> None:
    expected = ranks(1, _one_rank)[0]
    found = ranks(size, _steps, seeds)
    for index, seed in enumerate(seeds):
        schedule = random_schedule(seed, size)
        validate_schedule(schedule)
        steps = [rank[index] for rank in found]
        loss, bits = expected[schedule.micro_batches]
        assert sum(loss for loss, _ in steps) == loss, seed
        assert {name: digest for _, mine in steps for name, digest in mine.items()} == bits, seed
