"""Every schedule, on every placement, gives the bits of one rank: losses, gradients, norm, statistics, evaluation.

The suite takes some numbers of micro-batches; `pytest -m matrix` takes all up to twelve, on every number of ranks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megasnn.engine.model import DistributedModel
from megasnn.models.build import describe_model
from tests.parity import spikingjelly_reference as reference
from tests.parity.ranks import (
    Bits,
    Layout,
    assert_equal_to_one,
    bits_of,
    built,
    inputs_of,
    model_config,
)

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


def step(engine: DistributedModel, samples: int) -> Bits:
    """One training step and one evaluation. Nothing is left over for the next call."""
    before = [(e.tensor, e.tensor.clone()) for e in engine.tensors if not e.is_parameter]
    images, labels = reference.data(2 * MOST, torch.float32)
    bits = bits_of(engine, inputs_of(engine, images[:samples], labels[:samples], min(2, samples)), samples)
    for tensor, value in before:
        tensor.copy_(value)
    return bits


def steps(stages: int, schedules: list[tuple[str, int]], numbers: list[int]) -> dict[tuple, Bits]:
    found = {}
    for name, chunks in schedules:
        with built(describe_model(model_config()), Layout(1, 1, stages, name, chunks), torch.float32) as engine:
            for count in numbers:
                found[name, chunks, count] = step(engine, samples_of(count))
    return found


def whole(ranks: list[dict[tuple, Bits]], case: tuple) -> Bits:
    """What all ranks hold together."""
    parts = [rank[case] for rank in ranks]
    tensors = {name: bits for part in parts for name, bits in part.tensors.items()}
    assert sum(len(part.tensors) for part in parts) == len(tensors)
    same = [replace(part, tensors=tensors) for part in parts]
    assert all(each == same[0] for each in same)
    return same[0]


@pytest.fixture(scope="module")
def one_rank(ranks) -> dict[int, Bits]:
    found = ranks(1, steps, 1, [("1f1b", 1)], list(ALL))
    return {count: whole(found, ("1f1b", 1, count)) for count in ALL}


@pytest.mark.parametrize(
    ("size", "numbers"),
    [*NUMBERS.items(), *(pytest.param(size, ALL, marks=pytest.mark.matrix) for size in NUMBERS)],
)
def test_every_schedule_gives_the_bits_of_one_rank(ranks, one_rank, size, numbers) -> None:
    found = ranks(size, steps, size, list(SCHEDULES), list(numbers))
    for name, chunks in SCHEDULES:
        for count in numbers:
            assert whole(found, (name, chunks, count)) == one_rank[count], (name, chunks, count)


@pytest.mark.parametrize("schedule", ["zbv", "interleaved"])
def test_replicas_with_different_numbers_of_micro_batches(ranks, schedule: str) -> None:
    """Their schedules differ, and their chunks are done in another order."""
    assert_equal_to_one(ranks, model_config(), [Layout(2, 1, 2, schedule)], reference.data(9))
