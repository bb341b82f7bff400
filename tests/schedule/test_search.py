"""What searches find, and what they cost."""

from __future__ import annotations

import cProfile
import pstats
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.schedule import ChunkCost, Transfer, equal_costs, generate, per_stage, simulate
from megasnn.schedule.evaluate import forecast, forecasts_of_named, of_named
from megasnn.schedule.named import SCHEDULES, CostsOf
from megasnn.schedule.search import least_time

NAMES = tuple(SCHEDULES)
V_NAMES = ("zbv", "v-half", "v-min")
quarters = st.integers(0, 8).map(lambda quarter: quarter / 4)
ways = st.builds(Transfer, *[st.sampled_from([0.0, 0.125, 0.5])] * 3)


@st.composite
def costs(draw: st.DrawFn, stages: int) -> CostsOf:
    def stage() -> ChunkCost:
        forward, inputs, weights = draw(quarters), draw(quarters), draw(quarters)
        return ChunkCost(forward, inputs + weights, 0.0, 1.0, inputs, weights, output=draw(ways), gradient=draw(ways))

    return per_stage([stage() for _ in range(stages)])


def uneven(stages: int, moves: bool) -> CostsOf:
    """No two neighbours cost the same, and no two parts of a stage; all are multiples of 1/32, which add up exactly."""
    way = Transfer(0.125, 0.0625, 0.03125) if moves else None
    whole = []
    for stage in range(stages):
        forward, inputs, weights = 1 + stage * 3 % 4 / 4, 1 + stage * 5 % 4 / 8, 0.75 + stage % 3 / 4
        whole.append(ChunkCost(forward, inputs + weights, 0.0, 1.0, inputs, weights, way, way))
    return per_stage(whole)


# What a step took before the search used bounds: all candidates filled by passes over all ranks, and all simulated.
BEFORE = {
    (2, 8, False): (33.75, 33.75, 32.375, 32.0, 32.0, 31.5, 31.5, 31.5, 31.5, 45.0),
    (2, 8, True): (34.84375, 34.84375, 35.03125, 32.9375, 32.9375, 33.4375, 33.4375, 33.4375, 32.9375, 48.5),
    (4, 8, False): (43.75, 41.375, 36.0625, 36.125, 35.25, 34.5, 36.5625, 42.625, 34.5, 42.125),
    (4, 8, True): (46.375, 44.53125, 39.9375, 38.78125, 37.15625, 38.0, 41.125, 50.78125, 37.15625, 50.78125),
    (4, 32, False): (145.75, 137.375, 132.0625, 132.125, 131.375, 130.5, 132.5625, 159.625, 130.5, 150.125),
    (4, 32, True): (
        152.875,
        146.53125,
        144.9375,
        139.28125,
        137.9375,
        143.0,
        146.125,
        185.03125,
        137.65625,
        182.78125,
    ),
    (8, 16, False): (92.0, 89.0, 75.3125, 75.0, 74.125, 70.75, 81.875, 88.375, 69.625, 88.375),
    (8, 16, True): (97.875, 95.28125, 83.8125, 80.53125, 77.40625, 78.21875, 98.59375, 112.15625, 76.5625, 109.03125),
    (8, 64, False): (296.0, 287.0, 273.3125, 273.0, 271.375, 268.75, 300.875, 304.375, 268.125, 304.375),
    (8, 64, True): (
        310.875,
        302.28125,
        299.8125,
        287.53125,
        284.84375,
        294.21875,
        352.09375,
        385.15625,
        283.5625,
        371.53125,
    ),
}


@pytest.mark.parametrize(("stages", "micro_batches", "moves"), BEFORE)
def test_makespans_are_those_of_the_full_search_or_better(stages: int, micro_batches: int, moves: bool) -> None:
    costs_of = uneven(stages, moves)

    def makespan(name: str, limit: float | None = None) -> float:
        schedule = generate(name, stages, micro_batches, None, costs_of, limit)
        result = simulate(schedule, costs_of(schedule.placement))
        assert limit is None or max(result.peak_activations) <= limit
        return result.makespan

    *named, free, limited = BEFORE[stages, micro_batches, moves]
    assert [makespan(name) for name in NAMES] == named
    assert makespan("auto") <= free
    assert makespan("auto", stages // 2) <= limited


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 16), st.data())
def test_a_candidate_is_judged_as_it_is_simulated(
    name: str, stages: int, micro_batches: int, data: st.DataObject
) -> None:
    costs_of, filled_by = data.draw(costs(stages)), data.draw(costs(stages))
    chunks = 2 if name == "interleaved" or name in V_NAMES else 1
    candidate = of_named(name, stages, micro_batches, chunks, costs_of, filled_by)
    schedule = generate(name, stages, micro_batches, chunks, filled_by)
    assert candidate.schedule() == schedule
    result = simulate(schedule, costs_of(schedule.placement))
    assert candidate.makespan == result.makespan
    assert candidate.held == max(result.peak_activations)
    whole = name in ("gpipe", "1f1b", "interleaved")
    assert least_time(schedule.placement, costs_of(schedule.placement), micro_batches, whole) <= result.makespan


def test_forecasts_are_simulations_in_short() -> None:
    costs_of = uneven(4, moves=True)
    for found in forecasts_of_named(4, 12, costs_of):
        schedule = generate(found.name, 4, 12, None, costs_of)
        told = forecast(schedule, costs_of(schedule.placement))
        assert (found.makespan, found.activations) == (told.makespan, told.activations)
        assert found.idle_share == pytest.approx(told.idle_share)


def test_a_limit_makes_the_search_fill_within_it() -> None:
    """Two stages whose two chunks together hold one micro-batch: 45 where only schedules made for it are looked at."""
    costs_of = uneven(2, moves=False)
    best = generate("auto", 2, 8, None, costs_of, 1)
    result = simulate(best, costs_of(best.placement))
    assert max(result.peak_activations) <= 1
    assert result.makespan == 39.5


def operations(name: str, stages: int, micro_batches: int) -> int:
    """Calls of functions, Python's own included: the same on every machine."""
    profile = cProfile.Profile()
    costs_of = uneven(stages, moves=True)
    profile.runcall(generate, name, stages, micro_batches, None, costs_of)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb1p", "zbv", "v-half"])
def test_work_is_linear_in_the_number_of_actions(name: str) -> None:
    least = operations(name, 8, 64)
    assert operations(name, 8, 128) < 2.3 * least
    assert operations(name, 16, 64) < 2.5 * least  # with twice the warm-up


def seconds(name: str, stages: int, micro_batches: int, costs_of: CostsOf | None = None) -> float:
    start = time.process_time()
    generate(name, stages, micro_batches, None, costs_of)
    return time.process_time() - start


def test_large_schedules_are_found_in_seconds() -> None:
    """A core takes a fifth of this. Looking at all ranks for every action, twice the size took 9, 31 and 80 s."""
    assert seconds("interleaved", 32, 256) < 3
    assert seconds("zbv", 32, 256) < 3
    assert seconds("auto", 16, 256, uneven(16, moves=True)) < 6


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*NAMES, "auto"])
def test_64_stages_and_512_micro_batches(name: str) -> None:
    assert seconds(name, 64, 512, uneven(64, moves=True)) < (90 if name == "auto" else 15)


def test_equal_costs_need_no_second_filling() -> None:
    best = generate("auto", 8, 32)
    assert best.name == "zbv"
    assert simulate(best, equal_costs(8)(best.placement)).makespan == 99.5  # 3 x 32, and half of 7 forwards before
