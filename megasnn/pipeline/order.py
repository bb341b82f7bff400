"""Which order of actions a pipeline takes: the fastest, or of those that keep a budget of memory the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megasnn.pipeline.costs import PipelineCosts
from megasnn.pipeline.peaks import Travelling, beside_of_layers
from megasnn.schedule import ChunkCost, Kind, SchedulePlan, plan_schedule, simulate
from megasnn.schedule.budget import BudgetError, within_budget
from megasnn.schedule.evaluate import Forecast, forecast, forecasts_of_named
from megasnn.schedule.named import AUTO
from megasnn.schedule.partition import placed_bounds
from megasnn.schedule.refine import NEVER
from megasnn.schedule.weights import SharedWeights

WeightsOf = Callable[[Sequence[range]], SharedWeights]
"""The layers of each unit -> what is gathered of them."""
ExchangedOf = Callable[[Sequence[range], Sequence[int]], Sequence[Travelling]]
"""The layers of each chunk, and its rank -> bytes that travel to and from those who own rows, on each rank."""


@dataclass(frozen=True)
class PipelineRequest:
    """What is asked for.

    Attributes:
        schedule: a name, or "auto".
        chunks_per_rank: None: auto may choose.
        memory_limit: activations that a rank may hold, in whole stages' micro-batches.
        bounds: the layers of each chunk; None: balanced by the measured costs.
        micro_batch_size: samples in each micro-batch.
        micro_batches: the numbers of them that replicas have in a step, the largest first.
        predicts: whether costs are wanted even where the plan would not need any.
        recompute: a name in `RECOMPUTE`.
        memory_budget: bytes that a step may need on a rank (`StepPeak.total`); forwards are computed again to keep it.
        weight_limit: bytes of gathered weights that a rank may hold, where replicas share weights; None: as few as let
            the next ones be gathered while others are used.
        scatters: whether gradients then go to those who keep the rows after every micro-batch.
        rows_have_owners: whether each row of a trained parameter belongs to one of the replicas.
    """

    schedule: str
    chunks_per_rank: int | None
    memory_limit: float | None
    bounds: tuple[range, ...] | None
    micro_batch_size: int
    micro_batches: tuple[int, ...]
    predicts: bool = False
    recompute: str = NEVER
    memory_budget: float | None = None
    weight_limit: float | None = None
    scatters: bool = False
    rows_have_owners: bool = False

    @property
    def repeats(self) -> bool:
        """Whether forwards may be computed again."""
        return self.recompute != NEVER or self.memory_budget is not None


@dataclass(frozen=True)
class Compared:
    """An order that was looked at for a budget, or for weights that replicas share.

    Attributes:
        alone: seconds of a step in which nothing is computed again and nothing gathered. whole: with both; None where
            that cannot be.
    """

    name: str
    alone: float
    whole: float | None


@dataclass(frozen=True)
class Order:
    """What was decided.

    Attributes:
        bounds: the layers of each chunk.
        named: what the named schedules would take, each on its own cut, without a budget; empty without costs.
        compared: in this order, the one that was taken among them; empty where there was nothing to compare.
    """

    bounds: tuple[range, ...]
    schedules: SchedulePlan
    named: tuple[Forecast, ...] = ()
    compared: tuple[Compared, ...] = ()


def decide_order(
    request: PipelineRequest,
    stages: int,
    layers: int,
    costs: PipelineCosts | None,
    weights_of: WeightsOf | None = None,
    weight_ranks: int = 1,
    exchanged_of: ExchangedOf | None = None,
) -> Order:
    """The one search of a run, for every number of micro-batches that a replica may have.

    With `auto`, and a budget or shared weights, the fastest order by itself need not be the fastest one: orders are
    tried from the fastest by itself on, until the next one would not even win by itself.

    Args:
        weights_of: where replicas share weights; layers are executed one by one then. weight_ranks: how many do.
        exchanged_of: where rows have owners, for a budget.
    Raises:
        ValueError: what the schedule cannot place, a memory limit or a budget that it cannot keep.
    """
    usual, counts = request.micro_batches[0], _possible_counts(request, stages, layers)
    chunks = counts[0] if len(counts) == 1 else request.chunks_per_rank
    if costs is None:
        plan = _planned(request, stages, request.schedule, chunks, None)
        assert request.bounds is not None
        return Order(request.bounds, _executed(plan, request, request.bounds, None, weights_of))
    cut = Cut(request, costs, exchanged_of)
    first = _planned(request, stages, request.schedule, chunks, cut)
    compared = counts if request.bounds is not None else (1, 2)[: layers // stages]
    named = tuple(forecasts_of_named(stages, usual, cut.costs_of, request.memory_limit, compared))
    if request.schedule != AUTO or stages == 1 or (request.memory_budget is None and weights_of is None):
        bounds = cut.bounds_of(first.placement)
        return Order(bounds, _executed(first, request, bounds, cut, weights_of), named)
    orders = _orders(request, stages, first, counts, cut)
    return replace(_fastest(orders, request, cut, weights_of, weight_ranks), named=named)


def _orders(
    request: PipelineRequest, stages: int, first: SchedulePlan, counts: Sequence[int], cut: Cut
) -> Iterator[tuple[str, float, SchedulePlan]]:
    """The one that was searched for, and the named ones that are another, with their seconds alone, the fastest first.

    Args:
        counts: the chunks that each rank may have.
    """
    usual = request.micro_batches[0]
    best = forecast(first.of_chunks(usual), cut.costs_of(first.placement))
    yield best.name, best.makespan, first
    others = [
        (each.makespan, each.name, count)
        for count in counts
        for each in forecasts_of_named(stages, usual, cut.costs_of, request.memory_limit, (count,))
        if each.name != best.name
    ]
    for alone, name, count in sorted(others):
        yield name, alone, _planned(request, stages, name, count, cut)


def _fastest(
    orders: Iterator[tuple[str, float, SchedulePlan]],
    request: PipelineRequest,
    cut: Cut,
    weights_of: WeightsOf | None,
    weight_ranks: int,
) -> Order:
    """Of orders with their seconds alone, the fastest first, the one that takes least with all that comes to it."""
    best, least, refusals = None, float("inf"), list[ValueError]()
    looked_at: list[Compared] = []
    for name, alone, plan in orders:
        if alone >= least:
            break
        bounds, whole = cut.bounds_of(plan.placement), None
        try:
            schedules = _executed(plan, request, bounds, cut, weights_of)
            whole = simulate(
                schedules.training(request.micro_batches[0]),
                chunk_costs(schedules, bounds, cut.costs, weight_ranks),
                schedules.wholes,
            ).makespan
            if whole < least:
                best, least = Order(bounds, schedules), whole
        except ValueError as error:
            refusals.append(error)
        looked_at.append(Compared(name, alone, whole))
    if best is None:
        raise min(refusals, key=lambda each: each.least if isinstance(each, BudgetError) else 0.0)
    return replace(best, compared=tuple(looked_at))


def _planned(
    request: PipelineRequest, stages: int, name: str, chunks_per_rank: int | None, cut: Cut | None
) -> SchedulePlan:
    """The order of a name, of chunks."""
    costs_of = None if cut is None else cut.costs_of
    plan = plan_schedule(name, stages, chunks_per_rank, request.micro_batches[0], costs_of, request.memory_limit)
    return replace(plan, decided=tuple(plan.of_chunks(count) for count in dict.fromkeys(request.micro_batches)))


def _executed(
    plan: SchedulePlan,
    request: PipelineRequest,
    bounds: tuple[range, ...],
    cut: Cut | None,
    weights_of: WeightsOf | None,
) -> SchedulePlan:
    """With what is computed again and gathered. Raises ValueError for what cannot be."""
    if request.recompute != NEVER or weights_of is not None:
        plan = plan.in_units(bounds, request.recompute)
    if request.memory_budget is not None and cut is not None:
        plan = _within_budget(plan, request, bounds, cut)
    return plan if weights_of is None else plan.sharing(weights_of(plan.unit_bounds(bounds)), request.micro_batches)


def _within_budget(plan: SchedulePlan, request: PipelineRequest, bounds: Sequence[range], cut: Cut) -> SchedulePlan:
    """With forwards that are computed again, in units; as it is where none has to be."""
    assert request.memory_budget is not None
    refined = plan.in_units(bounds, NEVER)
    exchanged = cut.exchanged(plan.placement)
    units = refined.unit_bounds(bounds), refined.executed_placement
    memory = cut.costs.unit_memory(*units, beside_of_layers(exchanged))
    limits = request.memory_budget, [each.behind for each in exchanged]
    chosen = {
        count: within_budget(refined.training(count), memory, *limits) for count in dict.fromkeys(request.micro_batches)
    }
    # A step of another length, at the end of an epoch, is shorter.
    return replace(refined, recompute="always", chosen=chosen) if any(chosen.values()) else plan


def _possible_counts(request: PipelineRequest, stages: int, layers: int) -> tuple[int, ...]:
    """The chunks that each rank may have."""
    if request.bounds is not None:
        return (len(request.bounds) // stages,)
    if request.chunks_per_rank is not None:
        return (request.chunks_per_rank,)
    return (1,) if 2 * stages > layers else (1, 2)


def chunk_costs(
    schedules: SchedulePlan, bounds: Sequence[range], costs: PipelineCosts, weight_ranks: int
) -> list[ChunkCost]:
    """Of what is executed, with the time to gather weights that `weight_ranks` replicas share."""
    found = costs.of_chunks(schedules.unit_bounds(bounds), schedules.executed_placement)
    weights = schedules.weights
    return found if weights is None else costs.with_gathers(found, weights.unit_bytes, weight_ranks)


def with_forwards_again(costs: Sequence[ChunkCost]) -> list[ChunkCost]:
    """A forward that is computed again comes right before its backward, as a part of that."""
    return [
        replace(
            each,
            backward=each.backward + each.time(Kind.RECOMPUTE),
            input_gradient=each.time(Kind.INPUT_GRADIENT) + each.time(Kind.RECOMPUTE),
        )
        for each in costs
    ]


class Cut:
    """A model's cut for any placement, and what it makes of the layers' costs.

    Attributes:
        costs: of the layers.
    """

    def __init__(self, request: PipelineRequest, costs: PipelineCosts, exchanged_of: ExchangedOf | None = None) -> None:
        self._request, self.costs, self._exchanged_of = request, costs, exchanged_of
        self.bounds_of = lru_cache(maxsize=None)(self._bounds_of)
        self.costs_of = lru_cache(maxsize=None)(self._costs_of)
        self.exchanged = lru_cache(maxsize=None)(self._exchanged)

    def _bounds_of(self, placement: tuple[int, ...]) -> tuple[range, ...]:
        if self._request.bounds is not None:
            return self._request.bounds
        return tuple(placed_bounds([layer.seconds for layer in self.costs.layers], placement))

    def _costs_of(self, placement: tuple[int, ...]) -> Sequence[ChunkCost]:
        costs = self.costs.of_chunks(self.bounds_of(placement), placement)
        return costs if self._request.recompute == NEVER else with_forwards_again(costs)

    def _exchanged(self, placement: tuple[int, ...]) -> Sequence[Travelling]:
        """Nothing where rows have no owners."""
        return () if self._exchanged_of is None else self._exchanged_of(self.bounds_of(placement), placement)
