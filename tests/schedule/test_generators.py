"""Every named schedule, its plan and the search: figures of the reference table, validity over sizes and costs."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.schedule import (
    ChunkCost,
    Kind,
    Schedule,
    chunk_costs,
    equal_costs,
    generate,
    plan_schedule,
    simulate,
    validate_schedule,
)
from megasnn.schedule.actions import COMPUTE
from megasnn.schedule.generators import half_limit, min_limit
from megasnn.schedule.named import SCHEDULES, CostsOf, named_schedule
from megasnn.schedule.passes import complete

NAMES = tuple(SCHEDULES)
durations = st.integers(1, 8).map(lambda quarter: quarter / 4)


@st.composite
def costs(draw: st.DrawFn, stages: int) -> CostsOf:
    def stage() -> ChunkCost:
        forward = draw(durations)
        inputs = draw(durations)
        weights = draw(durations)
        transfer = draw(st.sampled_from([0.0, 0.25]))
        return ChunkCost(forward, inputs, weights, transfer, transfer)

    return partial(chunk_costs, [stage() for _ in range(stages)])


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, order)) for order in schedule.actions]


@pytest.mark.parametrize(
    ("name", "makespan", "bubble", "peak"),
    [
        ("gpipe", 33, 9, 8),
        ("1f1b", 33, 9, 4),
        ("zb1p", 27, 3, 4),
        ("zb2p", 27, 0, 8),
        ("zbv", 25.5, 0, 4),
        ("v-half", 26.5, 2.5, 3),
        ("v-min", 29.5, 5.5, 2),
        ("interleaved", 28.5, 4.5, 5.5),
    ],
)
def test_reference_values(name: str, makespan: float, bubble: float, peak: float) -> None:
    """Four stages, eight micro-batches, T_F = T_B = T_W = 1: per-stage work 24."""
    schedule = generate(name, 4, 8)
    result = simulate(schedule, equal_costs(4)(schedule.placement))
    assert (result.makespan, max(result.bubble), max(result.peak_activations)) == (makespan, bubble, peak)
    assert result.busy == (24,) * 4


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(1, 24))
def test_formulas_of_1f1b_and_interleaved(stages: int, micro_batches: int) -> None:
    result = simulate(generate("1f1b", stages, micro_batches), [ChunkCost(1, 1, 1)] * stages)
    assert result.makespan == 3 * (micro_batches + stages - 1)
    assert result.peak_activations == tuple(min(stages - rank, micro_batches) for rank in range(stages))
    for rank, order in enumerate(generate("1f1b", stages, 8 + stages).actions):
        computed = [action.kind for action in order if action.kind in COMPUTE]
        assert computed.index(Kind.BACKWARD) == stages - rank  # p - r - 1 of warm-up, and the first of the steady state
    for rank, order in enumerate(generate("interleaved", stages, 2 * stages, 3).actions):
        computed = [action.kind for action in order if action.kind in COMPUTE]
        assert computed.index(Kind.BACKWARD) == 2 * (stages - rank - 1) + 2 * stages + 1
    if micro_batches >= 2 * stages:
        full = generate("interleaved", stages, micro_batches)
        peak = max(simulate(full, equal_costs(stages)(full.placement)).peak_activations)
        assert peak == pytest.approx(stages * (1 + (stages - 1) / (2 * stages)))


def test_orders_by_hand() -> None:
    assert rows(generate("1f1b", 1, 2)) == ["0F0 0B0 0F1 0B1 0REDUCE_GRAD"]
    assert rows(generate("zb1p", 1, 2)) == ["0F0 0I0 0W0 0F1 0I1 0W1 0REDUCE_GRAD"]
    assert rows(generate("gpipe", 2, 2)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD",
    ]
    assert rows(generate("1f1b", 3, 3))[1] == (
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1RECV_F2 1F2 1SEND_F2 "
        "1RECV_B1 1B1 1SEND_B1 1RECV_B2 1B2 1SEND_B2 1REDUCE_GRAD"
    )
    assert rows(plan_schedule("1f1b", 2).evaluation(2)) == ["0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1"]


@pytest.mark.parametrize(
    ("name", "placement"),
    [("interleaved", (0, 1, 0, 1)), ("zbv", (0, 1, 1, 0)), ("zb2p", (0, 1)), ("v-min", (0, 1, 1, 0))],
)
def test_placements(name: str, placement: tuple[int, ...]) -> None:
    assert plan_schedule(name, 2).placement == generate(name, 2, 3).placement == placement
    assert plan_schedule(name, 2, len(placement) // 2).placement == placement


def promised(name: str, stages: int, micro_batches: int) -> float:
    """Activations that a schedule may hold, in whole stages' micro-batches."""
    limits = {"1f1b": stages, "zb1p": stages, "zb2p": 2 * stages, "zbv": stages}
    limits |= {"v-half": half_limit(stages), "v-min": min_limit(stages)}
    return min(limits.get(name, micro_batches), micro_batches)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 32), st.integers(2, 4), st.data())
def test_every_size_is_valid_and_within_memory(
    name: str, stages: int, micro_batches: int, chunks: int, data: st.DataObject
) -> None:
    costs_of = data.draw(costs(stages))
    schedule = generate(name, stages, micro_batches, chunks if name == "interleaved" else None, costs_of)
    validate_schedule(schedule)
    result = simulate(schedule, costs_of(schedule.placement))
    assert max(result.peak_activations) <= promised(name, stages, micro_batches) + 1e-9
    work = sum(cost.forward + cost.backward for cost in costs_of(tuple(range(stages)))) * micro_batches
    assert sum(result.busy) == pytest.approx(work)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 32), st.integers(1, 4))
def test_evaluation_on_a_loop_keeps_every_rank_busy(stages: int, micro_batches: int, chunks: int) -> None:
    """No rank waits longer than the pipeline takes to fill and drain."""
    schedule = plan_schedule("interleaved" if chunks > 1 else "1f1b", stages, chunks).evaluation(micro_batches)
    validate_schedule(schedule)
    result = simulate(schedule, equal_costs(stages)(schedule.placement))
    assert result.makespan <= micro_batches + stages - 1 + 1e-9
    assert max(result.peak_activations) == 1 / chunks


def test_auto_keeps_the_placement_that_is_best_for_a_usual_step() -> None:
    plan = plan_schedule("auto", 4, micro_batches=8)
    best = plan.training(8)
    assert simulate(best, equal_costs(4)(best.placement)).makespan <= 25.5  # of zbv
    for micro_batches in (1, 3, 8, 9):
        assert plan.training(micro_batches).placement == plan.placement
        assert plan.evaluation(micro_batches).placement == plan.placement


def test_auto_on_one_stage_is_1f1b() -> None:
    assert plan_schedule("auto", 1).placement == (0,)
    assert plan_schedule("auto", 1).training(3).actions == generate("1f1b", 1, 3).actions


def test_a_plan_builds_a_schedule_once_and_sends_none() -> None:
    plan = plan_schedule("zbv", 4, micro_batches=8).in_segments([range(each, each + 2) for each in range(8)], "always")
    small = len(pickle.dumps(plan))
    schedule = plan.training(8)
    assert plan.training(8) is schedule and plan.training(4).micro_batches == 4
    assert len(pickle.dumps(plan)) == small and pickle.loads(pickle.dumps(plan)).training(8) == schedule
    assert replace(plan, recompute="never").training(8) != schedule


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("zigzag", 2), "--pipeline-schedule 'zigzag'"),
        (("1f1b", 2, 2), "--num-virtual-stages-per-pipeline-rank 2"),
        (("zbv", 2, 3), "--num-virtual-stages-per-pipeline-rank 3"),
        (("interleaved", 2, 1), "--num-virtual-stages-per-pipeline-rank 1"),
        (("interleaved", 2, 0), "--num-virtual-stages-per-pipeline-rank must be at least 1, got 0"),
        (("1f1b", 0), "--pipeline-model-parallel-size must be at least 1, got 0"),
        (("1f1b", 2, None, 0), "micro-batches must be at least 1, got 0"),
    ],
)
def test_refusals_name_the_flag(arguments: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        plan_schedule(*arguments)


def uneven(stages: int, moves: bool) -> CostsOf:
    """No two neighbours cost the same, and no two parts of a stage; all are multiples of 1/32, which add up exactly."""
    way = 0.21875 if moves else 0.0
    whole = []
    for stage in range(stages):
        forward = 1 + stage * 3 % 4 / 4
        inputs = 1 + stage * 5 % 4 / 8
        weights = 0.75 + stage % 3 / 4
        whole.append(ChunkCost(forward, inputs, weights, way, way))
    return partial(chunk_costs, whole)


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
    validate_schedule(best)
    least = min(simulate(schedule, costs_of(schedule.placement)).makespan for schedule in named)
    assert simulate(best, costs_of(best.placement)).makespan <= least


def test_the_search_keeps_the_name_of_its_result() -> None:
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
