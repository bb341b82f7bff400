import pickle
from dataclasses import replace

import pytest

from megasnn.schedule import equal_costs, generate, plan_schedule, simulate


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
