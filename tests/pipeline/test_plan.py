"""The plan that the first rank makes of measured costs, for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megasnn.config import ParallelConfig, TrainingConfig
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext
from megasnn.models.build import describe
from megasnn.models.model import run_config
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline import profile_layers
from megasnn.pipeline.cost_model import LayerCost
from megasnn.pipeline.plan import PipelinePlan, plan_pipeline
from tests.parity.ranks import model_config

MODEL = describe(model_config(), NeuronSpec())


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
            context = BuildContext(state.tp, cp=state.cp, cut="rows")
            plan = plan_pipeline(config, MODEL, context, state, MODEL.build(context))
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
    assert "--pipeline-schedule auto: " in first.describe("auto")[0]


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
