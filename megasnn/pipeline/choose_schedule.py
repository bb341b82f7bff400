"""Choice of a pipeline's schedule: the fastest, or of those that keep a budget of memory the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megasnn.pipeline.cost_model import PipelineCosts, with_recompute_in_backward
from megasnn.pipeline.peak_memory import unit_memory
from megasnn.pipeline.recompute_budget import BudgetError, within_budget
from megasnn.schedule import ChunkCost, SchedulePlan, plan_schedule, simulate
from megasnn.schedule.fsdp_passes import SharedWeights
from megasnn.schedule.named import AUTO
from megasnn.schedule.partition import placed_bounds
from megasnn.schedule.passes import NEVER
from megasnn.schedule.search import Forecast, forecast_named

WeightsOf = Callable[[Sequence[range]], SharedWeights]
"""Layers of each unit -> weights to gather."""
ExchangedOf = Callable[[Sequence[range], Sequence[int]], Sequence[int]]
"""Layers of each chunk, and its rank -> bytes that travel to and from those who own rows, on each rank."""


@dataclass(frozen=True)
class PipelineRequest:
    """Request of a run for its pipeline.

    Attributes:
        schedule: a name, or "auto".
        chunks_per_rank: None: auto may choose.
        bounds: layers of each chunk; None: balanced by the measured costs.
        micro_batch_size: samples in each micro-batch.
        micro_batches: the numbers of them that replicas have in a step, the largest first.
        predicts: whether costs are wanted even where the plan would not need any.
        recompute: a name in `RECOMPUTE`.
        memory_budget: bytes that a step may need on a rank; forwards are computed again to keep it.
        scatters: whether gradients go to those who keep the rows after every micro-batch, where replicas shard weights.
        rows_have_owners: whether each row of a trained parameter belongs to one of the replicas.
    """

    schedule: str
    chunks_per_rank: int | None
    bounds: tuple[range, ...] | None
    micro_batch_size: int
    micro_batches: tuple[int, ...]
    predicts: bool = False
    recompute: str = NEVER
    memory_budget: float | None = None
    scatters: bool = False
    rows_have_owners: bool = False

    @property
    def repeats(self) -> bool:
        """True if forwards may be computed again."""
        return self.recompute != NEVER or self.memory_budget is not None


@dataclass(frozen=True)
class Candidate:
    """A schedule that was compared for a budget, or for weights that replicas shard.

    Attributes:
        alone: seconds of a step in which nothing is computed again and nothing gathered.
        whole: seconds with both; None where that cannot be.
    """

    name: str
    alone: float
    whole: float | None


@dataclass(frozen=True)
class ScheduleChoice:
    """Chosen partition and schedule.

    Attributes:
        bounds: layers of each chunk.
        named: forecasts of the named schedules, each on its own partition, without a budget; empty without costs.
        compared: in this order, the chosen one among them; empty where there was nothing to compare.
    """

    bounds: tuple[range, ...]
    schedules: SchedulePlan
    named: tuple[Forecast, ...] = ()
    compared: tuple[Candidate, ...] = ()


class Partitioner:
    """Partition of a model for any placement, and the costs of its chunks.

    Attributes:
        costs: of the layers.
        bounds_of: placement -> layers of each chunk. costs_of: placement -> cost of each chunk.
    """

    def __init__(self, request: PipelineRequest, costs: PipelineCosts) -> None:
        self._request, self.costs = request, costs
        self.bounds_of = lru_cache(maxsize=None)(self._bounds_of)
        self.costs_of = lru_cache(maxsize=None)(self._costs_of)

    def _bounds_of(self, placement: tuple[int, ...]) -> tuple[range, ...]:
        if self._request.bounds is not None:
            return self._request.bounds
        return tuple(placed_bounds([layer.seconds for layer in self.costs.layers], placement))

    def _costs_of(self, placement: tuple[int, ...]) -> Sequence[ChunkCost]:
        costs = self.costs.of_chunks(self.bounds_of(placement), placement)
        return costs if self._request.recompute == NEVER else with_recompute_in_backward(costs)


def choose_schedule(
    request: PipelineRequest,
    stages: int,
    layers: int,
    costs: PipelineCosts | None,
    weights_of: WeightsOf | None = None,
    weight_ranks: int = 1,
    exchanged_of: ExchangedOf | None = None,
) -> ScheduleChoice:
    """Searches once in a run, for every number of micro-batches that a replica may have.

    With `auto`, and a budget or sharded weights, the schedule that is fastest by itself need not be the fastest one:
    schedules are tried from the fastest by itself on, until the next one would not even win by itself.

    Args:
        weights_of: where replicas shard weights; layers are executed one by one then. weight_ranks: how many do.
        exchanged_of: where rows have owners, for a budget.
    Raises:
        ValueError: what the schedule cannot place, or a budget that it cannot keep.
    """
    counts = _possible_chunks(request, stages, layers)
    chunks = counts[0] if len(counts) == 1 else request.chunks_per_rank
    if costs is None:
        assert request.bounds is not None
        plan = _planned(request, stages, request.schedule, chunks, None)
        return ScheduleChoice(request.bounds, _executed(plan, request, request.bounds, None, weights_of, exchanged_of))
    partitioner = Partitioner(request, costs)
    first = _planned(request, stages, request.schedule, chunks, partitioner)
    usual = request.micro_batches[0]
    shown = counts if request.bounds is not None else (1, 2)[: layers // stages]
    named = tuple(forecast_named(stages, usual, partitioner.costs_of, shown))
    compares = request.memory_budget is not None or weights_of is not None
    orders: Iterator[tuple[str, float, SchedulePlan]] = iter([(request.schedule, 0.0, first)])
    if request.schedule == AUTO and stages > 1 and compares:
        orders = _fastest_first(request, stages, first, counts, partitioner)
    best, least, refusals, compared = None, float("inf"), list[ValueError](), list[Candidate]()
    for name, alone, plan in orders:
        if alone >= least:
            break
        bounds, whole = partitioner.bounds_of(plan.placement), None
        try:
            schedules = _executed(plan, request, bounds, partitioner, weights_of, exchanged_of)
            chunk_costs = executed_costs(schedules, bounds, costs, weight_ranks)
            whole = simulate(schedules.training(usual), chunk_costs, schedules.wholes).makespan
            if whole < least:
                best, least = ScheduleChoice(bounds, schedules, named), whole
        except ValueError as error:
            refusals.append(error)
        compared.append(Candidate(name, alone, whole))
    if best is None:
        raise min(refusals, key=lambda each: each.least if isinstance(each, BudgetError) else 0.0)
    return replace(best, compared=tuple(compared)) if request.schedule == AUTO and stages > 1 and compares else best


def _possible_chunks(request: PipelineRequest, stages: int, layers: int) -> tuple[int, ...]:
    """Numbers of chunks that each rank may have."""
    if request.bounds is not None:
        return (len(request.bounds) // stages,)
    if request.chunks_per_rank is not None:
        return (request.chunks_per_rank,)
    return (1,) if 2 * stages > layers else (1, 2)


def _fastest_first(
    request: PipelineRequest, stages: int, first: SchedulePlan, counts: Sequence[int], partitioner: Partitioner
) -> Iterator[tuple[str, float, SchedulePlan]]:
    """Schedule that was searched for, and the named ones that are another, with their seconds alone.

    Args:
        counts: numbers of chunks that each rank may have.
    """
    usual = request.micro_batches[0]
    schedule = first.of_chunks(usual)
    yield schedule.name, simulate(schedule, partitioner.costs_of(first.placement)).makespan, first
    others = [
        (each.makespan, each.name, count)
        for count in counts
        for each in forecast_named(stages, usual, partitioner.costs_of, (count,))
        if each.name != schedule.name
    ]
    for alone, name, count in sorted(others):
        yield name, alone, _planned(request, stages, name, count, partitioner)


def _planned(
    request: PipelineRequest, stages: int, name: str, chunks_per_rank: int | None, partitioner: Partitioner | None
) -> SchedulePlan:
    """Schedule of chunks."""
    costs_of = None if partitioner is None else partitioner.costs_of
    plan = plan_schedule(name, stages, chunks_per_rank, request.micro_batches[0], costs_of)
    return replace(plan, decided=tuple(plan.of_chunks(count) for count in dict.fromkeys(request.micro_batches)))


def _executed(
    plan: SchedulePlan,
    request: PipelineRequest,
    bounds: tuple[range, ...],
    partitioner: Partitioner | None,
    weights_of: WeightsOf | None,
    exchanged_of: ExchangedOf | None,
) -> SchedulePlan:
    """Adds forwards that are computed again, and gathers. Raises ValueError for what cannot be."""
    if request.recompute != NEVER or weights_of is not None:
        plan = plan.in_units(bounds, request.recompute)
    if request.memory_budget is not None and partitioner is not None:
        refined = plan.in_units(bounds, NEVER)
        memory = unit_memory(partitioner.costs, refined.unit_bounds(bounds))
        exchanged = () if exchanged_of is None else exchanged_of(bounds, plan.placement)
        chosen = {
            count: within_budget(refined.training(count), memory, request.memory_budget, exchanged)
            for count in dict.fromkeys(request.micro_batches)
        }
        if any(chosen.values()):
            # A step of another length, at the end of an epoch, is shorter.
            plan = replace(refined, recompute="always", chosen=chosen)
    return plan if weights_of is None else plan.sharing(weights_of(plan.unit_bounds(bounds)), request.micro_batches)


def executed_costs(
    schedules: SchedulePlan, bounds: Sequence[range], costs: PipelineCosts, weight_ranks: int
) -> list[ChunkCost]:
    """Costs of the units that are executed, with the time to gather weights that `weight_ranks` replicas shard."""
    found = costs.of_chunks(schedules.unit_bounds(bounds), schedules.executed_placement)
    weights = schedules.weights
    return found if weights is None else costs.with_unshards(found, weights.unit_bytes, weight_ranks)
