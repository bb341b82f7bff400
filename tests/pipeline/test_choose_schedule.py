"""Choice of a pipeline's schedule where a budget, or gathered weights, decide which one is fastest."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts
from megasnn.pipeline.plan import PipelinePlan, PipelineRequest, ScheduleChoice, executed_costs
from megasnn.pipeline.recompute import BudgetError
from megasnn.schedule import SCHEDULES, simulate
from megasnn.schedule.fsdp_passes import SharedWeights

MB = 10**6
STAGES, MICRO_BATCHES = 4, 8


def costs_of(layers: int) -> PipelineCosts:
    """Layers that leave little for the second part of their backwards."""
    sizes = {"held": 10 * MB, "deferred": 2 * MB, "message": MB // 4, "gradient": 2 * MB, "output": 2 * MB}
    each = LayerCost(0.001, 0.001, 0.001, working=(12 * MB, 12 * MB, 6 * MB), again=0.0009, **sizes)
    return PipelineCosts((each,) * layers, LinkCost(), LinkCost(per_byte=1e-9))


COSTS = costs_of(16)


def chosen(schedule: str, budget: float | None) -> PipelinePlan:
    limit = None if budget is None else budget * MB
    request = PipelineRequest(schedule, None, None, 2, (MICRO_BATCHES,), memory_budget=limit)
    return ScheduleChoice(request, STAGES, len(COSTS.layers), COSTS).make()


def seconds(choice: PipelinePlan, ranks: int = 1) -> float:
    costs = executed_costs(choice.schedules, choice.bounds, COSTS, ranks)
    return simulate(choice.schedules.training(MICRO_BATCHES), costs, choice.schedules.wholes).makespan


def test_with_a_budget_another_schedule_is_the_fastest() -> None:
    alone, best = chosen("auto", None), chosen("auto", 150)
    names = [each.schedules.training(MICRO_BATCHES).name for each in (alone, best)]
    assert names == ["zbv", "v-half"] and not alone.compared
    before = chosen("zbv", 150)  # the fastest one alone, with the budget behind it
    assert seconds(alone) < seconds(best) < 0.98 * seconds(before)
    assert [name for name, _ in best.compared] == names, "no other one is as fast even without"
    assert [time for _, time in best.compared] == pytest.approx([seconds(before), seconds(best)])
    assert max(best.step_bytes(MICRO_BATCHES)) <= 150 * MB
    told = best.describe("auto")[-1]
    assert "--memory-budget 150" in told and "v-half" in told


@pytest.mark.parametrize("budget", [200, 100, 40])
def test_no_named_schedule_keeps_a_budget_in_less_time(budget: float) -> None:
    best = chosen("auto", budget)
    for name in SCHEDULES:
        try:
            other = chosen(name, budget)
        except BudgetError:
            continue
        assert seconds(best) <= 1.001 * seconds(other), name


def test_a_budget_that_none_keeps_is_refused_with_the_least_of_all() -> None:
    with pytest.raises(BudgetError) as refused:
        chosen("auto", 5)
    least = refused.value.least
    assert max(chosen("auto", least / MB + 0.1).step_bytes(MICRO_BATCHES)) <= least + 0.1 * MB
    with pytest.raises(BudgetError):
        chosen("auto", least / MB - 0.1)


def test_gathers_count_where_schedules_are_compared() -> None:
    """To gather the weights of a layer takes as long as to compute with them."""

    def weights(units: Sequence[range]) -> SharedWeights:
        return SharedWeights(tuple(4 * MB * len(each) for each in units))

    request = PipelineRequest("auto", None, None, 2, (MICRO_BATCHES,))
    choice = ScheduleChoice(request, STAGES, len(COSTS.layers), COSTS, weights, 2).make()
    times = [each for _, each in choice.compared if each is not None]
    assert seconds(choice, ranks=2) == min(times) and len(times) > 1


@pytest.mark.slow
def test_a_large_pipeline_is_decided_in_seconds() -> None:
    request = PipelineRequest("auto", None, None, 2, (32,), memory_budget=150 * MB)
    begun = time.thread_time()
    assert ScheduleChoice(request, 8, 32, costs_of(32)).make().compared
    assert time.thread_time() - begun < 10
