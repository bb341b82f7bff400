"""A pipeline's plan: measured and decided once for all ranks; its schedule, and what is computed again."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest

from megasnn.config import ParallelConfig, TrainingConfig
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext
from megasnn.models.build import describe_model
from megasnn.models.model import run_config
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline import profile_layers
from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts
from megasnn.pipeline.peak_memory import peak_moments
from megasnn.pipeline.plan import PipelinePlan, choose_plan, plan_pipeline
from megasnn.schedule.passes import SharedWeights
from tests.parity.ranks import model_config

MODEL = describe_model(model_config(), NeuronSpec())


def _plan(micro_batches: int, searches: bool, flags: dict[str, Any]) -> PipelinePlan | str:
    """On two stages of ranks that all measure differently; all may search, or the first alone."""
    parallel = ParallelConfig(pipeline_model_parallel_size=2, **flags)
    state = initialize_model_parallel(pp=2, cp=parallel.context_parallel_size)
    training = TrainingConfig(micro_batch_size=2, global_batch_size=2 * micro_batches, train_iters=1)
    config = run_config(type(model_config()))(
        model=model_config(),
        training=training,
        parallel=parallel,
    )
    profile = profile_layers.profile_layers

    def measure(*given: object) -> list[LayerCost]:
        found = enumerate(profile(*given))  # type: ignore[arg-type]
        return [replace(cost, forward=cost.forward * (1 + state.rank * index)) for index, cost in found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_layers, "profile_layers", measure)
        if not searches and state.rank > 0:
            for name in ("find_best", "named_schedule"):
                patch.setattr(f"megasnn.schedule.plan.{name}", _no_search)
        try:
            context = BuildContext(state, context_cut="rows")
            plan = plan_pipeline(config, MODEL, context, MODEL.build(context))
            for schedule in plan.schedules.decided:
                assert plan.schedules.training(schedule.micro_batches) is schedule, "what was decided is what runs"
            return plan
        except ValueError as error:
            return str(error)
        finally:
            destroy_model_parallel()


def _no_search(*_: object) -> None:
    raise AssertionError("this rank must not search")


def test_ranks_get_the_plan_of_the_first(ranks) -> None:
    """Of nine micro-batches the replicas have five and four."""
    first, *others = ranks(4, _plan, 9, False, {})
    assert others == [first] * 3
    link = first.costs.link
    assert link.latency + link.per_byte > 0  # on a busy machine either may drown in noise
    assert [schedule.micro_batches for schedule in first.schedules.decided] == [5, 4]
    assert all(schedule.placement == first.schedules.placement for schedule in first.schedules.decided)
    assert "--pipeline-schedule auto: " in first.describe(ParallelConfig())[0]


def test_ranks_that_share_rows_get_the_plan_of_the_first(ranks) -> None:
    first, *others = ranks(4, _plan, 5, True, {"context_parallel_size": 2})
    assert others == [first] * 3 and first.costs.layers[1].exchanged > 0


def test_nothing_is_measured_where_nothing_depends_on_it(ranks) -> None:
    flags = {"pipeline_schedule": "1f1b", "pipeline_model_parallel_layout": f"4|{len(MODEL.layers) - 4}"}
    plan, _ = ranks(2, _plan, 5, True, flags)
    assert plan.costs is None and plan.simulation(5) is None and plan.describe(ParallelConfig()) == []
    assert plan.bounds == (range(0, 4), range(4, len(MODEL.layers)))


def test_one_rank_searches_for_all_and_its_refusal_is_everybodys(ranks) -> None:
    first, second = ranks(2, _plan, 5, False, {"pipeline_schedule": "zb1p"})
    assert first == second and len(first.schedules.decided) == 1
    told = ranks(2, _plan, 5, False, {"pipeline_schedule": "gpipe", "memory_budget": 1e-6})
    assert all("--memory-budget" in text for text in told)


MB = 10**6
STAGES, MICRO_BATCHES, LAYERS = 4, 8, 16
SIZES: dict[str, Any] = {"held": 10 * MB, "deferred": 2 * MB, "message": MB // 4, "gradient": 2 * MB, "output": 2 * MB}
LAYER = LayerCost(0.001, 0.001, 0.001, working=(12 * MB, 12 * MB, 6 * MB), **SIZES)
COSTS = PipelineCosts((LAYER,) * LAYERS, LinkCost(per_byte=1e-9))


def chosen(schedule: str, budget: float | None = None, **more: Any) -> PipelinePlan:
    parallel = ParallelConfig(pipeline_schedule=schedule, memory_budget=budget, **more)
    return choose_plan(
        parallel, stages=STAGES, layers=LAYERS, counts=[MICRO_BATCHES], bounds=None, costs=COSTS
    )


def needs(plan: PipelinePlan) -> float:
    """MB of the rank that needs most."""
    schedule = plan.schedules.training(MICRO_BATCHES)
    return 1e-6 * max(each.total for each in peak_moments(schedule, plan.segment_bounds, COSTS))


def seconds(plan: PipelinePlan) -> float:
    result = plan.simulation(MICRO_BATCHES)
    assert result is not None
    return result.makespan


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
    plan = choose_plan(
        parallel,
        stages=STAGES,
        layers=LAYERS,
        counts=[MICRO_BATCHES],
        bounds=None,
        costs=COSTS,
        weights_of=lambda segments: SharedWeights((8 * MB,) * len(segments)),
    )
    assert plan.schedules.segments_per_chunk is not None and seconds(plan) > 1.2 * seconds(chosen("auto"))


def test_a_large_pipeline_is_decided_in_seconds() -> None:
    begun = time.thread_time()
    costs = PipelineCosts((LAYER,) * 32, LinkCost())
    parallel = ParallelConfig(memory_budget=150)
    plan = choose_plan(parallel, stages=8, layers=32, counts=[32], bounds=None, costs=costs)
    assert plan.schedules.chosen
    assert time.thread_time() - begun < 10
