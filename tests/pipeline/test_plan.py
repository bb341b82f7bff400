"""The plan that the first rank makes of measured costs, for all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext
from megasnn.models.build import describe
from megasnn.parallel.agreement import broadcast_result
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline import profile_layers
from megasnn.pipeline.cost_model import LayerCost
from megasnn.pipeline.plan import PipelinePlan, PipelineRequest, plan_pipeline
from tests.parity.ranks import model_config

MODEL = describe(model_config(), NeuronSpec())
REQUEST = PipelineRequest("auto", None, None, 2, (5, 4))


def _plan(request: PipelineRequest, searches: bool = True, context_size: int = 1) -> PipelinePlan | str:
    """On two stages of ranks that all measure differently; all may search, or the first alone."""
    state = initialize_model_parallel(pp=2, cp=context_size)
    profile = profile_layers.profile_layers

    def measure(*given: object) -> list[LayerCost]:
        found = enumerate(profile(*given))  # type: ignore[arg-type]
        return [replace(cost, forward=cost.forward * (1 + state.rank * index)) for index, cost in found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_layers, "profile_layers", measure)
        if not searches and state.rank > 0:
            for name in ("find_best", "named_schedule"):
                patch.setattr(f"megasnn.schedule.plan.{name}", _no_search)
        context = BuildContext(state.tp, cp=state.cp, cut="rows")
        try:
            plan = plan_pipeline(MODEL, request, context, state)
            for count in request.micro_batches:
                plan.schedules.training(count)
            return plan
        except ValueError as error:
            return str(error)
        finally:
            destroy_model_parallel()


def _no_search(*_: object) -> None:
    raise AssertionError("this rank must not search")


def test_ranks_get_the_plan_of_the_first_and_it_is_the_best(ranks) -> None:
    first, second = ranks(2, _plan, REQUEST)
    assert first == second
    link = first.costs.link
    assert link.latency + link.per_byte > 0 and first.named  # on a busy machine either may drown in noise
    assert first.forecast(5).makespan <= min(each.makespan for each in first.named) * (1 + 1e-9)
    # What was decided is what runs, for both numbers of micro-batches.
    assert [schedule.micro_batches for schedule in first.schedules.decided] == [5, 4]
    for schedule in first.schedules.decided:
        assert first.schedules.training(schedule.micro_batches) is schedule
        assert schedule.placement == first.schedules.placement
    said = "\n".join(first.describe("auto"))
    assert "named ones: " in said and "micro-batches' activations" in said


def test_ranks_that_share_rows_get_the_plan_of_the_first(ranks) -> None:
    first, *others = ranks(4, _plan, REQUEST, True, 2)
    assert others == [first] * 3 and first.costs.layers[1].exchanged > 0


def test_nothing_is_measured_where_nothing_depends_on_it(ranks) -> None:
    bounds = (range(0, 4), range(4, len(MODEL.layers)))
    fixed = replace(REQUEST, schedule="1f1b", chunks_per_rank=1, bounds=bounds)
    (plan, _), (predicted, _) = ranks(2, _plan, fixed), ranks(2, _plan, replace(fixed, predicts=True))
    assert plan.costs is None and plan.simulation(5) is None and plan.describe("1f1b") == []
    assert predicted.bounds == plan.bounds == bounds
    simulation = predicted.simulation(5)
    assert simulation is not None and simulation.makespan > 0
    # 1F1B on two stages: the first one keeps two micro-batches beside a backward, the last one.
    held = [sum(predicted.costs.layers[i].held for i in span) for span in bounds]
    first, last = predicted.step_bytes(5)
    assert 2 * held[0] < first and held[1] < last


@pytest.mark.parametrize("schedule, chunks", [("auto", None), ("zb1p", 1)])
def test_one_rank_searches_for_all(ranks, schedule: str, chunks: int | None) -> None:
    request = replace(REQUEST, schedule=schedule, chunks_per_rank=chunks)
    first, second = ranks(2, _plan, request, False)
    assert first == second and len(first.schedules.decided) == 2


def test_a_budget_that_cannot_be_kept_is_refused_on_every_rank(ranks) -> None:
    told = ranks(2, _plan, replace(REQUEST, schedule="gpipe", chunks_per_rank=1, memory_budget=1.0))
    assert all("--memory-budget" in text for text in told)


def _decide(works: bool) -> str:
    from tests.distributed.whole import everybody

    group = everybody("world")

    def decide() -> str:
        if not works:
            raise ValueError(f"rank {group.rank} refuses")
        return f"rank {group.rank} decided"

    try:
        return broadcast_result(group.handle, decide)
    except ValueError as error:
        return str(error)


def test_the_first_rank_decides_and_its_refusal_is_everybodys(ranks) -> None:
    assert ranks(3, _decide, True) == ["rank 0 decided"] * 3
    assert ranks(3, _decide, False) == ["rank 0 refuses"] * 3
