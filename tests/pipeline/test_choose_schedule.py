"""Choice of a pipeline's schedule, and what is computed again for a budget."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from megasnn.config import ParallelConfig
from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts
from megasnn.pipeline.peak_memory import peak_moments
from megasnn.pipeline.plan import PipelinePlan, choose
from megasnn.schedule.fsdp_passes import SharedWeights
from megasnn.schedule.named import SCHEDULES

MB = 10**6
STAGES, MICRO_BATCHES, LAYERS = 4, 8, 16
SIZES: dict[str, Any] = {"held": 10 * MB, "deferred": 2 * MB, "message": MB // 4, "gradient": 2 * MB, "output": 2 * MB}
LAYER = LayerCost(0.001, 0.001, 0.001, working=(12 * MB, 12 * MB, 6 * MB), **SIZES)
COSTS = PipelineCosts((LAYER,) * LAYERS, LinkCost(per_byte=1e-9))


def chosen(schedule: str, budget: float | None = None, **more: Any) -> PipelinePlan:
    parallel = ParallelConfig(pipeline_schedule=schedule, memory_budget=budget, **more)
    return choose(parallel, STAGES, LAYERS, [MICRO_BATCHES], None, COSTS)


def needs(plan: PipelinePlan) -> float:
    """MB of the rank that needs most."""
    schedule = plan.schedules.training(MICRO_BATCHES)
    return 1e-6 * max(each.total for each in peak_moments(schedule, plan.unit_bounds, COSTS))


def seconds(plan: PipelinePlan) -> float:
    result = plan.simulation(MICRO_BATCHES)
    assert result is not None
    return result.makespan


def test_auto_is_no_slower_than_any_named_one() -> None:
    best = chosen("auto")
    assert all(seconds(best) <= 1.001 * seconds(chosen(name)) for name in SCHEDULES)
    (line,) = best.describe(ParallelConfig())
    assert f"auto: {best.schedules.training(MICRO_BATCHES).name}, predicted" in line


@pytest.mark.parametrize("name", ["auto", "1f1b", "v-half"])
def test_a_budget_is_kept_in_more_time(name: str) -> None:
    alone = chosen(name)
    tight = chosen(name, 0.8 * needs(alone))
    assert needs(tight) <= 0.8 * needs(alone) and seconds(tight) > seconds(alone)
    assert tight.describe(ParallelConfig(memory_budget=0.5))[1].startswith("--memory-budget 0.5: ")
    assert not chosen(name, 1.01 * needs(alone)).schedules.chosen


def test_a_budget_that_cannot_be_kept_is_refused_with_the_least() -> None:
    with pytest.raises(ValueError, match="--memory-budget 5 .*--pipeline-schedule v-half") as refused:
        chosen("auto", 5)
    least = int(re.findall(r"--memory-budget (\d+)", str(refused.value))[1])
    assert needs(chosen("auto", least)) <= least
    with pytest.raises(ValueError, match="--memory-budget"):
        chosen("auto", least - 1)


def test_gathers_count_in_the_forecast() -> None:
    """To gather the weights of a layer takes longer than to compute with them."""
    parallel = ParallelConfig(weight_parallel_size=2)
    plan = choose(
        parallel, STAGES, LAYERS, [MICRO_BATCHES], None, COSTS, lambda units: SharedWeights((8 * MB,) * len(units))
    )
    assert plan.schedules.units_per_chunk is not None and seconds(plan) > 1.2 * seconds(chosen("auto"))


def test_a_large_pipeline_is_decided_in_seconds() -> None:
    begun = time.thread_time()
    costs = PipelineCosts((LAYER,) * 32, LinkCost())
    assert choose(ParallelConfig(memory_budget=150), 8, 32, [32], None, costs).schedules.chosen
    assert time.thread_time() - begun < 10
