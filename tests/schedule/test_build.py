import pickle
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.schedule import Kind, Schedule, equal_costs, generate, plan_schedule, simulate, validate
from megasnn.schedule.actions import COMPUTE
from megasnn.schedule.named import SCHEDULES

NAMES = tuple(SCHEDULES)


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, order)) for order in schedule.actions]


def test_one_rank_is_a_schedule_too() -> None:
    assert rows(generate("1f1b", 1, 2)) == ["0F0 0B0 0F1 0B1 0SYNC"]
    assert rows(generate("gpipe", 1, 2)) == ["0F0 0F1 0B0 0B1 0SYNC"]


def test_gpipe() -> None:
    assert rows(generate("gpipe", 2, 2)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0SYNC",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1SYNC",
    ]


def test_one_f_one_b() -> None:
    assert rows(generate("1f1b", 3, 3)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 0SYNC",
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1RECV_F2 1F2 1SEND_F2 "
        "1RECV_B1 1B1 1SEND_B1 1RECV_B2 1B2 1SEND_B2 1SYNC",
        "2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2B1 2SEND_B1 2RECV_F2 2F2 2B2 2SEND_B2 2SYNC",
    ]


def test_evaluation_has_no_backward_and_no_sync() -> None:
    assert rows(plan_schedule("1f1b", 2).evaluation(2)) == ["0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1"]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 32), st.booleans())
def test_all_sizes_are_valid(name: str, stages: int, micro_batches: int, forward_only: bool) -> None:
    plan = plan_schedule(name, stages, micro_batches=micro_batches)
    schedule = plan.evaluation(micro_batches) if forward_only else plan.training(micro_batches)
    validate(schedule)
    forwards = [a for order in schedule.actions for a in order if a.kind is Kind.FORWARD]
    assert len(forwards) == len(schedule.placement) * micro_batches


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 32), st.integers(1, 4))
def test_evaluation_on_a_loop_keeps_every_rank_busy(stages: int, micro_batches: int, chunks: int) -> None:
    """No rank waits longer than the pipeline takes to fill and drain."""
    name = "interleaved" if chunks > 1 else "1f1b"
    schedule = plan_schedule(name, stages, chunks).evaluation(micro_batches)
    validate(schedule)
    result = simulate(schedule, equal_costs(stages)(schedule.placement))
    assert result.makespan <= micro_batches + stages - 1 + 1e-9
    assert max(result.peak_activations) == 1 / chunks


@pytest.mark.parametrize("stages", range(1, 6))
def test_warm_up_of_1f1b(stages: int) -> None:
    for rank, order in enumerate(generate("1f1b", stages, 8).actions):
        computed = [action.kind for action in order if action.kind in COMPUTE]
        assert computed.index(Kind.BACKWARD) == stages - rank  # p - r - 1 of warm-up, and the first of the steady state


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


@pytest.mark.parametrize("name, placement", [("interleaved", (0, 1, 0, 1)), ("zbv", (0, 1, 1, 0)), ("zb2p", (0, 1))])
def test_placements(name: str, placement: tuple[int, ...]) -> None:
    assert plan_schedule(name, 2).placement == placement
    assert plan_schedule(name, 2, len(placement) // 2).placement == placement


def test_one_stage_holds_one_micro_batch_at_a_time() -> None:
    computed = [str(action) for action in plan_schedule("auto", 1).training(3).actions[0] if action.kind in COMPUTE]
    assert computed == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]


def test_refusals_name_the_flag() -> None:
    with pytest.raises(ValueError, match="--pipeline-schedule 'zigzag'"):
        generate("zigzag", 2, 2)
    with pytest.raises(ValueError, match="--num-virtual-stages-per-pipeline-rank 2"):
        plan_schedule("1f1b", 2, 2)
    with pytest.raises(ValueError, match="--num-virtual-stages-per-pipeline-rank 3: --pipeline-schedule zbv"):
        plan_schedule("zbv", 2, 3)
    with pytest.raises(ValueError, match="--num-virtual-stages-per-pipeline-rank 1: --pipeline-schedule interleaved"):
        plan_schedule("interleaved", 2, 1)
    with pytest.raises(ValueError, match="activations are held where --pipeline-memory-limit allows 3"):
        plan_schedule("gpipe", 2, micro_batches=4, memory_limit=3)
    with pytest.raises(ValueError, match="--pipeline-model-parallel-size must be at least 1, got 0"):
        generate("1f1b", 0, 2)
    with pytest.raises(ValueError, match="micro-batches must be at least 1, got 0"):
        generate("1f1b", 2, 0)


def test_a_large_schedule_is_cheap() -> None:
    start = time.process_time()
    generate("1f1b", 8, 256)
    assert time.process_time() - start < 2


def test_a_plan_builds_a_schedule_once_and_sends_none() -> None:
    plan = plan_schedule("zbv", 4, micro_batches=8).in_units([range(each, each + 2) for each in range(8)], "always")
    small = len(pickle.dumps(plan))
    schedule = plan.training(8)
    assert plan.training(8) is schedule and plan.training(4).micro_batches == 4
    assert len(pickle.dumps(plan)) == small and pickle.loads(pickle.dumps(plan)).training(8) == schedule
    assert replace(plan, recompute="never").training(8) != schedule
