"""Results of searches, and their cost."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.schedule import ChunkCost, equal_costs, generate, per_stage, simulate, validate
from megasnn.schedule.named import SCHEDULES, CostsOf, named_schedule
from megasnn.schedule.passes import complete
from tests.schedule.test_generators import NAMES, costs


def uneven(stages: int, moves: bool) -> CostsOf:
    """No two neighbours cost the same, and no two parts of a stage; all are multiples of 1/32, which add up exactly."""
    way = 0.21875 if moves else 0.0
    whole = []
    for stage in range(stages):
        forward, inputs, weights = 1 + stage * 3 % 4 / 4, 1 + stage * 5 % 4 / 8, 0.75 + stage % 3 / 4
        whole.append(ChunkCost(forward, inputs, weights, way, way))
    return per_stage(whole)


# Makespans of a search that tries everything to its end: of each name, and of auto.
FULL = {
    (2, 8, False): (33.75, 33.75, 32.375, 32.0, 32.0, 31.5, 31.5, 31.5, 31.5),
    (4, 8, True): (45.0625, 44.0625, 37.5625, 37.875, 36.125, 35.4375, 39.1875, 49.1875, 34.6875),
    (8, 16, True): (95.0625, 92.9375, 79.0, 78.75, 74.84375, 73.09375, 94.75, 107.625, 71.34375),
}


@pytest.mark.parametrize(("stages", "micro_batches", "moves"), FULL)
def test_makespans_are_those_of_the_full_search_or_better(stages: int, micro_batches: int, moves: bool) -> None:
    costs_of = uneven(stages, moves)

    def makespan(name: str) -> float:
        schedule = generate(name, stages, micro_batches, None, costs_of)
        return simulate(schedule, costs_of(schedule.placement)).makespan

    *named, best = FULL[stages, micro_batches, moves]
    assert [makespan(name) for name in NAMES] == named
    assert makespan("auto") <= best


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 8), st.integers(1, 32), st.sampled_from([None, 1, 2, 3, 4]), st.data())
def test_auto_is_never_worse_than_a_named_schedule(
    stages: int, micro_batches: int, chunks: int | None, data: st.DataObject
) -> None:
    costs_of = data.draw(costs(stages))
    named = [
        complete(named_schedule(name, stages, micro_batches, count, costs_of))
        for name, each in SCHEDULES.items()
        for count in ((1, 2) if chunks is None else (chunks,))
        if each.chunks <= count and each.can_place(count)
    ]
    best = generate("auto", stages, micro_batches, chunks, costs_of)
    validate(best)
    least = min(simulate(schedule, costs_of(schedule.placement)).makespan for schedule in named)
    assert simulate(best, costs_of(best.placement)).makespan <= least


def test_what_is_found_says_what_it_is() -> None:
    best = generate("auto", 8, 32)
    assert best.name == "zbv"
    assert simulate(best, equal_costs(8)(best.placement)).makespan == 99.5  # 3 x 32, and half of 7 forwards before


def seconds(name: str, stages: int, micro_batches: int, costs_of: CostsOf | None = None) -> float:
    start = time.process_time()
    generate(name, stages, micro_batches, None, costs_of)
    return time.process_time() - start


def test_large_schedules_are_found_in_seconds() -> None:
    """A core takes a fifth of this. Looking at all ranks for every action, twice the size took 9, 31 and 80 s."""
    assert seconds("interleaved", 32, 256) < 5
    assert seconds("zbv", 32, 256) < 5
    assert seconds("auto", 16, 64, uneven(16, moves=True)) < 10


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*NAMES, "auto"])
def test_64_stages_and_512_micro_batches(name: str) -> None:
    assert seconds(name, 64, 512, uneven(64, moves=True)) < (300 if name == "auto" else 15)
