"""Every schedule, on every placement, gives the bits of one rank: losses, gradients, norm, statistics, evaluation.

The suite takes some numbers of micro-batches; `pytest -m matrix` takes all up to twelve, on every number of ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megasnn.batching import micro_batch_sizes
from megasnn.engine.model import DistributedModel
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.microbatch_state import MicroBatchInput
from megasnn.schedule import plan_schedule
from tests.gradients import evaluated, forward_backward, merge_statistics
from tests.parity import spikingjelly_reference as reference
from tests.parity.ranks import Layout, assemble, build_engine, one_step
from tests.parity.test_layouts import TOLERANCE, assert_equal_to_reference, error, name_of, run_step, truth

# (schedule, chunks per rank)
SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zb1p", 1),
    ("zb2p", 1),
    ("zbv", 2),
    ("v-half", 2),
    ("v-min", 2),
    ("auto", 1),
    ("auto", 2),
)
MOST = 12
ALL = range(1, MOST + 1)
# Of micro-batches, for each number of ranks.
NUMBERS = {1: (12,), 2: (1, 7), 4: (5,)}


def samples_of(micro_batches: int) -> int:
    """With micro-batches of two, the last one is smaller for every second number of them."""
    return 2 * micro_batches - micro_batches % 2


def micro_batches(engine: DistributedModel, samples: int) -> list[MicroBatchInput]:
    images, labels = reference.data(2 * MOST, torch.float32)
    sizes = micro_batch_sizes(samples, min(2, samples))
    pieces = zip(images[:samples].split(sizes), labels[:samples].split(sizes), sizes, strict=True)
    return [
        MicroBatchInput(x if engine.takes_images else None, y if engine.gives_logits else None, n) for x, y, n in pieces
    ]


def digest(values: list[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: hashlib.sha1(value.detach().numpy().tobytes()).hexdigest() for name, value in values}


@dataclass
class Bits:
    """What a rank holds after a step, as digests by name."""

    loss: float
    norm: float
    evaluated: list[float]
    tensors: dict[str, str]


def step(engine: DistributedModel, samples: int) -> Bits:
    """One training step and one evaluation. Nothing is left over for the next call."""
    before = [(e.tensor, e.tensor.clone()) for e in engine.tensors if not e.is_parameter]
    batches = micro_batches(engine, samples)
    loss = forward_backward(engine, batches, samples)
    merge_statistics(engine, len(batches))
    values = [(e.name, e.tensor if e.tensor.grad is None else e.tensor.grad) for e in engine.tensors]
    bits = Bits(loss, engine.norm, evaluated(engine, batches), digest(values))
    for tensor, value in before:
        tensor.copy_(value)
    return bits


def steps(schedules: list[tuple[str, int]], numbers: list[int]) -> dict[tuple, Bits]:
    state = initialize_model_parallel(pp=torch.distributed.get_world_size())
    found = {}
    try:
        for name, chunks in schedules:
            engine = build_engine(state, plan_schedule(name, state.pp.size, chunks), torch.float32)
            for count in numbers:
                found[name, chunks, count] = step(engine, samples_of(count))
        return found
    finally:
        destroy_model_parallel()


def whole(ranks: list[dict[tuple, Bits]], case: tuple) -> Bits:
    """What all ranks hold together."""
    parts = [rank[case] for rank in ranks]
    tensors = {name: bits for part in parts for name, bits in part.tensors.items()}
    assert sum(len(part.tensors) for part in parts) == len(tensors)
    assert all((p.loss, p.norm, p.evaluated) == (parts[0].loss, parts[0].norm, parts[0].evaluated) for p in parts)
    return Bits(parts[0].loss, parts[0].norm, parts[0].evaluated, tensors)


@pytest.fixture(scope="module")
def one_rank(ranks) -> dict[int, Bits]:
    found = ranks(1, steps, [("1f1b", 1)], list(ALL))
    return {count: whole(found, ("1f1b", 1, count)) for count in ALL}


@pytest.mark.parametrize(
    ("size", "numbers"),
    [*NUMBERS.items(), *(pytest.param(size, ALL, marks=pytest.mark.matrix) for size in NUMBERS)],
)
def test_every_schedule_gives_the_bits_of_one_rank(ranks, one_rank, size, numbers) -> None:
    found = ranks(size, steps, list(SCHEDULES), list(numbers))
    for name, chunks in SCHEDULES:
        for count in numbers:
            assert whole(found, (name, chunks, count)) == one_rank[count], (name, chunks, count)


ZERO_BUBBLE_LAYOUTS = [
    Layout(1, 1, 4, "v-min"),
    Layout(1, 2, 2, "zb2p"),
    Layout(2, 2, 2, "zbv"),
    Layout(2, 2, 2, "interleaved", 2),
]


@pytest.mark.parametrize("layout", ZERO_BUBBLE_LAYOUTS, ids=name_of)
def test_schedules_equal_spikingjelly(ranks, layout: Layout) -> None:
    assert_equal_to_reference(run_step(ranks, layout), truth())


@pytest.mark.parametrize("schedule", ["zbv", "interleaved"])
def test_replicas_with_different_numbers_of_micro_batches(ranks, schedule: str) -> None:
    """Their schedules differ, and their chunks are done in another order."""
    images, labels = reference.data(9)
    one = ranks(1, one_step, Layout(), None, images, labels, 2)
    four = ranks(4, one_step, Layout(2, 1, 2, schedule), None, images, labels, 2)
    assert all(step.loss == pytest.approx(one[0].loss, rel=TOLERANCE) for step in four)
    for what in ("gradients", "buffers"):
        expected = assemble(one, what)
        for name, value in assemble(four, what).items():
            assert error(value, expected[name]) < TOLERANCE, name
