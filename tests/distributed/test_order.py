"""The order of a pipeline's actions where a budget, or gathered weights, decide which one is fastest."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from megasnn.pipeline.costs import LayerCost, LinkCost, PipelineCosts
from megasnn.pipeline.order import Order, PipelineRequest, chunk_costs, decide_order
from megasnn.pipeline.plan import PipelinePlan
from megasnn.schedule import simulate
from megasnn.schedule.budget import BudgetError
from megasnn.schedule.weights import SharedWeights

MB = 10**6
STAGES, MICRO_BATCHES = 4, 8


def costs_of(layers: int) -> PipelineCosts:
    """Layers that leave little for the second part of their backwards."""
    sizes = {"held": 10 * MB, "deferred": 2 * MB, "message": MB // 4, "gradient": 2 * MB, "output": 2 * MB}
    each = LayerCost(0.001, 0.001, 0.001, working=(12 * MB, 12 * MB, 6 * MB), again=0.0009, **sizes)
    return PipelineCosts((each,) * layers, LinkCost(), LinkCost(per_byte=1e-9))


COSTS = costs_of(16)


def decided(schedule: str, budget: float | None) -> Order:
    limit = None if budget is None else budget * MB
    request = PipelineRequest(schedule, None, None, None, 2, (MICRO_BATCHES,), memory_budget=limit)
    return decide_order(request, STAGES, len(COSTS.layers), COSTS)


def seconds(order: Order, ranks: int = 1) -> float:
    costs = chunk_costs(order.schedules, order.bounds, COSTS, ranks)
    return simulate(order.schedules.training(MICRO_BATCHES), costs, order.schedules.wholes).makespan


def name_of(order: Order) -> str:
    return order.schedules.training(MICRO_BATCHES).name


def test_with_a_budget_another_order_is_the_fastest() -> None:
    alone, best = decided("auto", None), decided("auto", 150)
    assert (name_of(alone), name_of(best)) == ("zbv", "v-half") and not alone.compared
    before = decided("zbv", 150)  # the order that is fastest alone, with the budget behind it
    assert seconds(alone) < seconds(best) < 0.98 * seconds(before)
    assert [each.name for each in best.compared] == ["zbv", "v-half"], "no other one is as fast even without"
    assert [each.whole for each in best.compared] == pytest.approx([seconds(before), seconds(best)])
    plan = PipelinePlan(best.bounds, best.schedules, MICRO_BATCHES, COSTS, best.named, best.compared, 150 * MB)
    assert max(plan.step_bytes(MICRO_BATCHES)) <= 150 * MB
    assert plan.describe("auto")[-1] == (
        "  compared within --memory-budget 150: zbv 108.3 ms (102.0 ms without), v-half 106.0 ms (106.0 ms without); "
        "no other one is faster"
    )


@pytest.mark.parametrize("budget", [200, 130, 100, 60, 40])
def test_no_named_schedule_keeps_a_budget_in_less_time(budget: float) -> None:
    best = decided("auto", budget)
    for name in ("gpipe", "1f1b", "interleaved", "zb1p", "zb2p", "zbv", "v-half", "v-min"):
        try:
            other = decided(name, budget)
        except BudgetError:
            continue
        assert seconds(best) <= 1.001 * seconds(other), name


def test_a_budget_that_none_keeps_is_refused_with_the_least_of_all() -> None:
    with pytest.raises(BudgetError) as refused:
        decided("auto", 5)
    least = refused.value.least
    assert name_of(decided("auto", least / MB + 0.1)) in [each.name for each in decided("auto", None).named]
    with pytest.raises(BudgetError):
        decided("auto", least / MB - 0.1)


def test_gathers_count_where_orders_are_compared() -> None:
    """To gather the weights of a layer takes as long as to compute with them."""

    def weights(units: Sequence[range]) -> SharedWeights:
        return SharedWeights(tuple(4 * MB * len(each) for each in units))

    request = PipelineRequest("auto", None, None, None, 2, (MICRO_BATCHES,))
    order = decide_order(request, STAGES, len(COSTS.layers), COSTS, weights, 2)
    whole = [each.whole for each in order.compared if each.whole is not None]
    assert seconds(order, ranks=2) == min(whole) and len(whole) > 1
    assert all(each.whole is None or each.whole > each.alone for each in order.compared)


@pytest.mark.slow
def test_a_large_pipeline_is_decided_in_less_than_five_seconds() -> None:
    request = PipelineRequest("auto", None, None, None, 2, (32,), memory_budget=150 * MB)
    begun = time.thread_time()
    order = decide_order(request, 8, 32, costs_of(32))
    assert time.thread_time() - begun < 5 and order.compared
