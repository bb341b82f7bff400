"""Every named schedule and its plan: the figures of the field's reference table, and validity over sizes and costs."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.schedule import (
    ChunkCost,
    Kind,
    Schedule,
    equal_costs,
    generate,
    per_stage,
    plan_schedule,
    simulate,
    validate,
)
from megasnn.schedule.actions import COMPUTE
from megasnn.schedule.named import SCHEDULES, CostsOf
from megasnn.schedule.zero_bubble import half_limit, min_limit

NAMES = tuple(SCHEDULES)
seconds = st.integers(1, 8).map(lambda quarter: quarter / 4)


@st.composite
def costs(draw: st.DrawFn, stages: int) -> CostsOf:
    def stage() -> ChunkCost:
        forward, inputs, weights = draw(seconds), draw(seconds), draw(seconds)
        transfer = draw(st.sampled_from([0.0, 0.25]))
        return ChunkCost(forward, inputs, weights, transfer, transfer)

    return per_stage([stage() for _ in range(stages)])


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
    validate(schedule)
    result = simulate(schedule, costs_of(schedule.placement))
    assert max(result.peak_activations) <= promised(name, stages, micro_batches) + 1e-9
    work = sum(cost.forward + cost.backward for cost in costs_of(tuple(range(stages)))) * micro_batches
    assert sum(result.busy) == pytest.approx(work)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 32), st.integers(1, 4))
def test_evaluation_on_a_loop_keeps_every_rank_busy(stages: int, micro_batches: int, chunks: int) -> None:
    """No rank waits longer than the pipeline takes to fill and drain."""
    schedule = plan_schedule("interleaved" if chunks > 1 else "1f1b", stages, chunks).evaluation(micro_batches)
    validate(schedule)
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
    plan = plan_schedule("zbv", 4, micro_batches=8).in_units([range(each, each + 2) for each in range(8)], "always")
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
