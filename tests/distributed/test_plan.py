"""Measured costs, and the plan that the first rank makes of them for all."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from math import prod

import pytest
import torch

from megasnn.comm.agreement import decided_by_first
from megasnn.comm.group import Group
from megasnn.comm.statistics import statistics
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext
from megasnn.models.building import describe
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline import link
from megasnn.pipeline import measured as measured_module
from megasnn.pipeline.chunk import describe_tensors
from megasnn.pipeline.costs import LayerCost, LinkCost, PipelineCosts
from megasnn.pipeline.measured import measure_layers
from megasnn.pipeline.order import PipelineRequest
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.plan import PipelinePlan, plan_pipeline
from megasnn.schedule import Kind
from tests.parity.ranks import model_config

MODEL = describe(model_config(), NeuronSpec())
CPU = torch.device("cpu")


def measured(samples: int, stages: int = 1) -> list[LayerCost]:
    return measure_layers(MODEL, samples, BuildContext(), CPU, WireOptions(), stages)


def test_costs_of_a_layer_are_what_it_does() -> None:
    four, eight = measured(4), measured(8, stages=2)
    assert len(four) == len(eight) == len(MODEL.layers)
    assert all(min(cost.forward, cost.input_gradient, cost.weight_gradient) > 0 for cost in four)
    assert [cost.gradient for cost in eight] == [2 * cost.gradient for cost in four]
    # Nothing that a layer keeps for backward grows with less than the samples, but for the norms' statistics.
    assert all(1.9 * a.held < b.held < 2.05 * a.held for a, b in zip(four, eight, strict=True))
    stem, block = four[0], four[5]
    assert stem.message == stem.gradient // 32  # a bit in place of a float32
    assert block.message == block.gradient // 4
    described = describe_tensors(MODEL, BuildContext())
    sizes = [prod(entry.shard.global_shape) for entry in described if entry.is_parameter]
    assert sum(cost.parameters for cost in four) == sum(cost.parameters for cost in eight) == 4 * sum(sizes)
    assert all(cost.parameters > 0 for cost in four)
    assert all((cost.collectives, cost.exchanged) == (0, 0) for cost in four)


@pytest.mark.parametrize(
    ("least_small", "per_byte"), [(1.0, 4.0), (6.0, 5.0)], ids=["few held up", "all small ones held up"]
)
def test_a_busy_machine_hides_no_cost_of_a_byte(monkeypatch, least_small: float, per_byte: float) -> None:
    """Most of the messages are held up, the small ones longer than the large ones."""
    small, large = [9.0] * 7 + [least_small] * 2, [8.0] * 7 + [5.0] * 2
    marks = chain.from_iterable((0.0, each) for pair in zip(small, large, strict=True) for each in pair)
    monkeypatch.setattr(link, "_now", lambda device: next(marks))
    monkeypatch.setattr(link, "_transfer", lambda *_, sends=True: None)
    monkeypatch.setattr(link, "_exchange", lambda *_: None)
    monkeypatch.setattr(link, "_all_cores_compute", lambda group: False)
    assert link.measure_link(Group("pipeline", (0, 1)), CPU) == LinkCost(least_small / 2, per_byte / link.LARGE)


def test_gradients_in_bf16_are_half_as_wide() -> None:
    narrow = measure_layers(MODEL, 2, BuildContext(), CPU, WireOptions(gradient_dtype=torch.bfloat16))
    assert [cost.gradient * 2 for cost in narrow] == [cost.gradient for cost in measured(2)]


def _measured_in_a_tensor_group() -> tuple[list[LayerCost], bool]:
    """And whether measuring a layer sent anything to the other tensor rank."""
    state = initialize_model_parallel(2, 1)
    try:
        with statistics.counting():
            costs = measure_layers(MODEL, 4, BuildContext(state.tensor), CPU, WireOptions())
        return costs, statistics.total("tensor").bytes > 0
    finally:
        statistics.reset()
        destroy_model_parallel()


def test_under_tensor_parallelism_a_layer_costs_its_rank_what_its_own_part_costs(ranks) -> None:
    whole = measured(4)
    for mine, exchanged in ranks(2, _measured_in_a_tensor_group):
        assert exchanged  # which is in the seconds
        # The second layer's input is gathered, a bit a spike, and its gradient of the same size summed.
        bits, gradient = whole[0].message // 2, whole[0].gradient // 2
        assert mine[1].collectives == 2 and bits + gradient // 2 <= mine[1].exchanged <= bits + 2 * gradient
        assert [2 * cost.parameters for cost in mine[:-1]] == [cost.parameters for cost in whole[:-1]]
        # All but the head give half of their channels to the next stage.
        assert [2 * cost.gradient for cost in mine[:-1]] == [cost.gradient for cost in whole[:-1]]
        assert all(cost.held < 0.8 * of_all.held for cost, of_all in zip(mine, whole, strict=True))


def _measured_by_rows() -> list[LayerCost]:
    state = initialize_model_parallel(1, 1, context_parallel_size=2)
    try:
        return measure_layers(MODEL, 4, BuildContext(context=state.context, cut="rows"), CPU, WireOptions())
    finally:
        destroy_model_parallel()


def test_by_rows_a_layer_costs_a_rank_what_its_rows_cost(ranks) -> None:
    whole = measured(4)
    for mine in ranks(2, _measured_by_rows):
        assert [cost.parameters for cost in mine] == [cost.parameters for cost in whole]
        # All but the head give half of their rows to the next stage; what is kept has rows of others, too.
        assert [2 * cost.gradient for cost in mine[:-1]] == [cost.gradient for cost in whole[:-1]]
        assert [2 * cost.message for cost in mine[:-1]] == [cost.message for cost in whole[:-1]]
        assert all(cost.held < 0.8 * of_all.held for cost, of_all in zip(mine[:-1], whole[:-1], strict=True))
        assert all(min(cost.collectives, cost.exchanged) > 0 for cost in mine), "what is exchanged is in the seconds"


def test_costs_of_chunks_are_sums() -> None:
    layers = tuple(LayerCost(1.0, 2.0, 3.0, 10, (50, 60, 70), 100, 400, 0.25, 0.5) for _ in range(3))
    costs = PipelineCosts(layers, LinkCost(0.125, 0.01, 0.002, 0.003))
    first, last = costs.of_chunks([range(0, 2), range(2, 3)], (0, 1))
    assert [first.time(kind) for kind in (Kind.FORWARD, Kind.BACKWARD)] == [2, 10]
    assert [last.time(kind) for kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)] == [2, 3]
    out, back = first.way(forward=True), first.way(forward=False)
    assert (out.send, out.receive) == pytest.approx((0.25 + 0.2, 0.5 + 0.3))
    # Packing, the way and unpacking together: as long as with both ends idle.
    assert out.send + out.time + out.receive == pytest.approx(0.25 + 0.125 + 1.0 + 0.5)
    assert (back.send, back.receive) == pytest.approx((0.8, 1.2))
    assert costs.held_bytes([range(0, 2), range(2, 3)]) == [20, 10]
    # The second layer runs beside the first one's activations and output; the second chunk beside its input.
    first_needs, last_needs = costs.working_bytes([range(0, 2), range(2, 3)])
    assert first_needs[Kind.FORWARD] == 10 + 400 + 50 and last_needs[Kind.FORWARD] == 400 + 50
    assert (first_needs[Kind.INPUT_GRADIENT], first_needs[Kind.WEIGHT_GRADIENT]) == (460, 70)
    assert first_needs[Kind.BACKWARD] == 470


REQUEST = PipelineRequest("auto", None, None, None, 2, (5, 4))


def _plan(request: PipelineRequest) -> PipelinePlan | str:
    """On two ranks that measure differently."""
    monkeypatch = pytest.MonkeyPatch()
    state = initialize_model_parallel(1, 2)
    try:
        if state.rank == 1:
            slow = [LayerCost(9.0 * index, 1.0, 1.0) for index in range(len(MODEL.layers))]
            monkeypatch.setattr(measured_module, "measure_layers", lambda *_: slow)
        return plan_pipeline(MODEL, request, BuildContext(state.tensor), state, WireOptions())
    except ValueError as error:
        return str(error)
    finally:
        monkeypatch.undo()
        destroy_model_parallel()


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


def _plan_by_rows() -> PipelinePlan:
    """On two stages of two ranks each, of which all measure differently."""
    state = initialize_model_parallel(1, 2, context_parallel_size=2)

    def measure(*given: object) -> list[LayerCost]:
        found = enumerate(measure_layers(*given))  # type: ignore[arg-type]
        return [replace(cost, forward=cost.forward * (1 + state.rank * index)) for index, cost in found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_module, "measure_layers", measure)
        context = BuildContext(context=state.context, cut="rows")
        try:
            return plan_pipeline(MODEL, REQUEST, context, state, WireOptions())
        finally:
            destroy_model_parallel()


def test_ranks_that_share_rows_get_the_plan_of_the_first(ranks) -> None:
    first, *others = ranks(4, _plan_by_rows)
    assert others == [first] * 3 and first.costs.layers[1].exchanged > 0


def test_nothing_is_measured_where_nothing_depends_on_it(ranks) -> None:
    bounds = (range(0, 4), range(4, len(MODEL.layers)))
    fixed = replace(REQUEST, schedule="1f1b", chunks_per_rank=1, bounds=bounds)
    (plan, _), (predicted, _) = ranks(2, _plan, fixed), ranks(2, _plan, replace(fixed, predicts=True))
    assert plan.costs is None and plan.simulation(5) is None and plan.describe("1f1b") == []
    assert predicted.bounds == plan.bounds == bounds
    simulation = predicted.simulation(5)
    assert simulation is not None and simulation.makespan > 0
    held, working = predicted.costs.held_bytes(bounds), predicted.costs.working_bytes(bounds)
    peaks = predicted.peak_bytes(5)
    # 1F1B on two stages: the first one runs forward beside one micro-batch's activations, and backward beside two.
    assert peaks[0] == max(held[0] + working[0][Kind.FORWARD], 2 * held[0] + working[0][Kind.BACKWARD])
    assert peaks[1] == max(working[1][Kind.FORWARD], held[1] + working[1][Kind.BACKWARD])


def _plan_where_only_the_first_rank_may_search(request: PipelineRequest) -> PipelinePlan | str:
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() > 0:
            for name in ("find_best", "generate"):
                patch.setattr(f"megasnn.schedule.build.{name}", _no_search)
        plan = _plan(request)
        if isinstance(plan, PipelinePlan):
            for count in request.micro_batches:
                plan.schedules.training(count)
        return plan


def _no_search(*_: object) -> None:
    raise AssertionError("this rank must not search")


@pytest.mark.parametrize("schedule, chunks, limit", [("auto", None, 2.0), ("zb1p", 1, None), ("1f1b", 1, 2.0)])
def test_one_rank_searches_for_all(ranks, schedule: str, chunks: int | None, limit: float | None) -> None:
    bounds = (range(0, 4), range(4, len(MODEL.layers))) if schedule == "1f1b" else None  # then nothing is measured
    request = replace(REQUEST, schedule=schedule, chunks_per_rank=chunks, memory_limit=limit, bounds=bounds)
    first, second = ranks(2, _plan_where_only_the_first_rank_may_search, request)
    assert first == second and len(first.schedules.decided) == 2


def test_a_limit_that_cannot_be_kept_is_refused_on_every_rank(ranks) -> None:
    told = ranks(2, _plan, replace(REQUEST, schedule="gpipe", chunks_per_rank=1, memory_limit=2.0))
    assert all("--pipeline-memory-limit allows 2" in text for text in told)


def _decide(works: bool) -> str:
    from tests.distributed.whole import everybody

    group = everybody("world")

    def decide() -> str:
        if not works:
            raise ValueError(f"rank {group.rank} refuses")
        return f"rank {group.rank} decided"

    try:
        return decided_by_first(group, decide)
    except ValueError as error:
        return str(error)


def test_the_first_rank_decides_and_its_refusal_is_everybodys(ranks) -> None:
    assert ranks(3, _decide, True) == ["rank 0 decided"] * 3
    assert ranks(3, _decide, False) == ["rank 0 refuses"] * 3
