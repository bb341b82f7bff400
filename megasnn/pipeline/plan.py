"""Plan of a model's pipeline: layers and place of each chunk, and the schedules; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from megasnn.layers.context import BuildContext
from megasnn.models.description import ModelDescription
from megasnn.parallel.agreement import broadcast_result
from megasnn.parallel.fsdp import unit_bytes
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.cost_model import PipelineCosts, with_recompute_in_backward
from megasnn.pipeline.peak_memory import peak_moments, unit_memory
from megasnn.pipeline.profile_layers import profile_pipeline
from megasnn.pipeline.recompute import BudgetError, within_budget
from megasnn.schedule import ChunkCost, Kind, SchedulePlan, Simulation, plan_schedule, simulate
from megasnn.schedule.fsdp_passes import SharedWeights
from megasnn.schedule.named import AUTO, looks_at_costs
from megasnn.schedule.partition import placed_bounds
from megasnn.schedule.passes import NEVER
from megasnn.schedule.search import Forecast, forecast_named

WeightsOf = Callable[[Sequence[range]], SharedWeights]
"""Layers of each unit -> weights to gather."""
_NAMED_SHOWN = 3  # of the named schedules, the fastest ones


@dataclass(frozen=True)
class PipelineRequest:
    """Request of a run for its pipeline.

    Attributes:
        schedule: a name, or "auto".
        chunks_per_rank: None: auto may choose.
        bounds: layers of each chunk; None: balanced by the measured costs.
        micro_batch_size: samples in each micro-batch.
        micro_batches: numbers of them that replicas have in a step, the largest first.
        predicts: costs are wanted even where the plan would not need any.
        recompute: a name in `RECOMPUTE`.
        memory_budget: bytes that a step may need on a rank; forwards are computed again to keep it.
        scatters: gradients go to those who keep the rows after every micro-batch, where replicas shard weights.
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

    @property
    def repeats(self) -> bool:
        """True if forwards may be computed again."""
        return self.recompute != NEVER or self.memory_budget is not None


@dataclass(frozen=True)
class PipelinePlan:
    """Partition and schedules of a run.

    Attributes:
        bounds: layers of each chunk.
        schedules: for any number of micro-batches; carries those decided on for the request's numbers.
        micro_batches: of a usual step.
        costs: measured; None where nobody needed them.
        named: forecasts of the named schedules, each on its own partition; empty without costs.
        compared: schedules that were tried for a budget, or for weights that replicas shard, with their seconds; None
            where one cannot be.
        memory_budget: as it was asked for.
        weight_ranks: number of replicas that share one copy of the weights.
    """

    bounds: tuple[range, ...]
    schedules: SchedulePlan
    micro_batches: int
    costs: PipelineCosts | None = None
    named: tuple[Forecast, ...] = ()
    compared: tuple[tuple[str, float | None], ...] = ()
    memory_budget: float | None = None
    weight_ranks: int = 1

    @property
    def executed_bounds(self) -> list[range]:
        """Layers of each unit, which is what a schedule that is executed calls a chunk."""
        return self.schedules.unit_bounds(self.bounds)

    def simulation(self, micro_batches: int) -> Simulation | None:
        """Simulation of a step of so many micro-batches, in seconds; None without costs."""
        if self.costs is None:
            return None
        costs = executed_costs(self.schedules, self.bounds, self.costs, self.weight_ranks)
        return simulate(self.schedules.training(micro_batches), costs, self.schedules.wholes)

    def forecast(self, micro_batches: int) -> Forecast | None:
        """`simulation` in short."""
        result = self.simulation(micro_batches)
        return None if result is None else Forecast.of(self.schedules.training(micro_batches).name, result)

    def step_bytes(self, micro_batches: int) -> list[int]:
        """Most bytes that a step needs at once on each pipeline rank, above weights, gradients and optimizer state.

        Activations, the computation under way, and tensors in transfer. Raises ValueError without costs.
        """
        if self.costs is None:
            raise ValueError("the memory of layers was not measured")
        schedule = self.schedules.training(micro_batches)
        return [peak.total for peak in peak_moments(schedule, self.executed_bounds, self.costs)]

    def repeated(self) -> list[dict[int, list[int]]]:
        """Micro-batches of a usual step whose forwards are computed again, by unit, on each pipeline rank."""
        found: list[dict[int, list[int]]] = []
        for row in self.schedules.training(self.micro_batches).actions:
            of_rank: dict[int, list[int]] = {}
            for unit, kind, m in row:
                if kind is Kind.RECOMPUTE and m is not None:
                    of_rank.setdefault(unit, []).append(m)
            found.append(dict(sorted(of_rank.items())))
        return found

    def describe(self, asked: str) -> list[str]:
        """Lines about the choice and its alternatives; none without costs. Args: asked: name of the schedule."""
        chosen = self.forecast(self.micro_batches)
        if chosen is None:
            return []
        lines = [
            f"--pipeline-schedule {asked}: {chosen.name}, predicted for {self.micro_batches} micro-batches "
            f"{_in_short(chosen)}, {chosen.activations:g} micro-batches' activations"
        ]
        named = [f"{each.name} {_in_short(each)}" for each in self.named[:_NAMED_SHOWN]]
        if len(self.named) > _NAMED_SHOWN:
            named.append(f"{len(self.named) - _NAMED_SHOWN} slower ones")
        lines.append("  named ones: " + ", ".join(named))
        if self.compared:
            budget = "" if self.memory_budget is None else f" within --memory-budget {1e-6 * self.memory_budget:g}"
            shards = "" if self.weight_ranks == 1 else f" with --weight-parallel-size {self.weight_ranks}"
            shown = [
                f"{name} {'not possible' if time is None else f'{1e3 * time:.1f} ms'}" for name, time in self.compared
            ]
            lines.append(f"  compared{budget}{shards}: {', '.join(shown)}; no other one is faster")
        return lines

    def describe_recompute(self) -> list[str]:
        """A line about forwards that are computed again, and with a budget, what that comes to."""
        if self.schedules.recompute == NEVER and self.memory_budget is None:
            return []
        repeated = self.repeated()
        count = sum(len(each) for of_rank in repeated for each in of_rank.values())
        forwards = sum(map(len, self.bounds)) * self.micro_batches
        text = f"{count} of a step's {forwards} forwards of layers are computed again"
        if self.memory_budget is None or self.costs is None:
            return [f"--recompute {self.schedules.recompute}: {text}"]
        costs = executed_costs(self.schedules, self.bounds, self.costs, self.weight_ranks)
        seconds = [sum(len(each) * costs[u].time(Kind.RECOMPUTE) for u, each in of.items()) for of in repeated]
        peaks = ", ".join(f"{1e-6 * each:.0f}" for each in self.step_bytes(self.micro_batches))
        return [
            f"--memory-budget {1e-6 * self.memory_budget:g}: {text}, {1e3 * max(seconds):.0f} ms on the rank that does "
            f"most; predicted for a step, above weights, gradients and optimizer state: {peaks} MB"
        ]


def _in_short(each: Forecast) -> str:
    return f"{1e3 * each.makespan:.1f} ms ({each.idle_share:.1%} bubble)"


def plan_pipeline(
    model: ModelDescription,
    request: PipelineRequest,
    context: BuildContext,
    state: ParallelState,
    costs: PipelineCosts | None = None,
) -> PipelinePlan:
    """Profiles layers where that is needed, on all ranks, and lets the first one choose. Collective over the world.

    Args:
        costs: measured before, the same on every rank.
    Raises:
        ValueError: on every rank, what the schedule cannot place, or a budget that it cannot keep.
    """
    stages, bounds, ranks = state.pp.size, request.bounds, context.dp_shard.size
    if bounds is None and stages == 1 and request.chunks_per_rank in (1, None):
        bounds = (range(len(model.layers)),)
    needs_costs = bounds is None or request.predicts or request.memory_budget is not None
    needs_costs |= stages > 1 and looks_at_costs(request.schedule)
    if needs_costs and costs is None:
        costs = profile_pipeline(model, request.micro_batch_size, context, state, request.repeats)
    weights_of = partial(shared_weights, model, context=context, scatters=request.scatters)
    choice = ScheduleChoice(
        replace(request, bounds=bounds), stages, len(model.layers), costs, None if ranks == 1 else weights_of, ranks
    )
    return broadcast_result(state.world.handle, choice.make)


def executed_costs(
    schedules: SchedulePlan, bounds: Sequence[range], costs: PipelineCosts, weight_ranks: int
) -> list[ChunkCost]:
    """Costs of the units that are executed, with the time to gather weights that `weight_ranks` replicas shard."""
    found = costs.of_chunks(schedules.unit_bounds(bounds), schedules.executed_placement)
    weights = schedules.weights
    return found if weights is None else costs.with_unshards(found, weights.unit_bytes, weight_ranks)


class ScheduleChoice:
    """Choice of a schedule, once in a run, for every number of micro-batches that a replica may have.

    With `auto`, and a budget or sharded weights, the schedule that is fastest by itself need not be the fastest one:
    schedules are tried from the fastest by itself on, until the next one would not even win by itself.

    Args:
        weights_of: where replicas shard weights; layers are executed one by one then. weight_ranks: how many do.
    """

    def __init__(
        self,
        request: PipelineRequest,
        stages: int,
        layers: int,
        costs: PipelineCosts | None,
        weights_of: WeightsOf | None = None,
        weight_ranks: int = 1,
    ) -> None:
        self._request, self._stages, self._layers, self._costs = request, stages, layers, costs
        self._weights_of, self._weight_ranks = weights_of, weight_ranks
        self._bounds_of = lru_cache(maxsize=None)(self._cut)
        self._costs_of = lru_cache(maxsize=None)(self._chunk_costs)

    def make(self) -> PipelinePlan:
        """Raises ValueError for what the schedule cannot place, and for a budget that it cannot keep."""
        request, usual, counts = self._request, self._request.micro_batches[0], self._chunk_counts()
        first = self._planned(request.schedule, counts[0] if len(counts) == 1 else request.chunks_per_rank)
        plan = PipelinePlan(
            self._bounds_of(first.placement),
            first,
            usual,
            self._costs,
            (),
            (),
            request.memory_budget,
            self._weight_ranks,
        )
        if self._costs is None:
            return replace(plan, schedules=self._executed(first))
        shown = counts if request.bounds is not None else (1, 2)[: self._layers // self._stages]
        plan = replace(plan, named=tuple(forecast_named(self._stages, usual, self._costs_of, shown)))
        compares = request.memory_budget is not None or self._weights_of is not None
        if request.schedule != AUTO or self._stages == 1 or not compares:
            return replace(plan, schedules=self._executed(first))
        best, least, refusals, compared = None, float("inf"), list[ValueError](), dict[str, float | None]()
        for name, alone, chunks in self._fastest_first(first, counts):
            if alone >= least:
                break
            compared[name] = None
            try:
                bounds, schedules = self._bounds_of(chunks.placement), self._executed(chunks)
            except ValueError as error:
                refusals.append(error)
                continue
            other = replace(plan, bounds=bounds, schedules=schedules)
            simulation = other.simulation(usual)
            assert simulation is not None
            compared[name] = simulation.makespan
            if simulation.makespan < least:
                best, least = other, simulation.makespan
        if best is None:
            raise min(refusals, key=lambda each: each.least if isinstance(each, BudgetError) else 0.0)
        return replace(best, compared=tuple(compared.items()))

    def _cut(self, placement: tuple[int, ...]) -> tuple[range, ...]:
        if self._request.bounds is not None:
            return self._request.bounds
        assert self._costs is not None
        return tuple(placed_bounds([layer.seconds for layer in self._costs.layers], placement))

    def _chunk_costs(self, placement: tuple[int, ...]) -> Sequence[ChunkCost]:
        assert self._costs is not None
        costs = self._costs.of_chunks(self._bounds_of(placement), placement)
        return costs if self._request.recompute == NEVER else with_recompute_in_backward(costs)

    def _chunk_counts(self) -> tuple[int, ...]:
        """Numbers of chunks that each rank may have."""
        if self._request.bounds is not None:
            return (len(self._request.bounds) // self._stages,)
        if self._request.chunks_per_rank is not None:
            return (self._request.chunks_per_rank,)
        return (1,) if 2 * self._stages > self._layers else (1, 2)

    def _planned(self, name: str, chunks_per_rank: int | None) -> SchedulePlan:
        """Schedule of chunks."""
        counts = self._request.micro_batches
        costs_of = None if self._costs is None else self._costs_of
        plan = plan_schedule(name, self._stages, chunks_per_rank, counts[0], costs_of)
        return replace(plan, decided=tuple(plan.of_chunks(count) for count in dict.fromkeys(counts)))

    def _fastest_first(self, first: SchedulePlan, counts: Sequence[int]) -> Iterator[tuple[str, float, SchedulePlan]]:
        """Schedule that was searched for, and the named ones that are another, with their seconds alone."""
        usual = self._request.micro_batches[0]
        schedule = first.of_chunks(usual)
        yield schedule.name, simulate(schedule, self._costs_of(first.placement)).makespan, first
        others = [
            (each.makespan, each.name, count)
            for count in counts
            for each in forecast_named(self._stages, usual, self._costs_of, (count,))
            if each.name != schedule.name
        ]
        for alone, name, count in sorted(others):
            yield name, alone, self._planned(name, count)

    def _executed(self, plan: SchedulePlan) -> SchedulePlan:
        """Adds forwards that are computed again, and gathers. Raises ValueError for what cannot be."""
        request, bounds = self._request, self._bounds_of(plan.placement)
        if request.recompute != NEVER or self._weights_of is not None:
            plan = plan.in_units(bounds, request.recompute)
        if request.memory_budget is not None and self._costs is not None:
            refined = plan.in_units(bounds, NEVER)
            memory = unit_memory(self._costs, refined.unit_bounds(bounds))
            chosen = {
                count: within_budget(refined.training(count), memory, request.memory_budget)
                for count in dict.fromkeys(request.micro_batches)
            }
            if any(chosen.values()):
                # A step of another length, at the end of an epoch, is shorter.
                plan = replace(refined, recompute="always", chosen=chosen)
        if self._weights_of is None:
            return plan
        return plan.sharing(self._weights_of(plan.unit_bounds(bounds)), request.micro_batches)


def shared_weights(
    model: ModelDescription,
    units: Sequence[range],
    context: BuildContext,
    limit: int | None = None,
    scatters: bool = False,
) -> SharedWeights:
    """Weights that replicas shard by rows, of each unit; nothing gets memory for that.

    Args:
        units: layers of each.
        limit: bytes of gathered weights that a rank may hold; None: of a unit and the one that is used behind it.
        scatters: gradients are scattered after every micro-batch.
    """
    layers = model.build(context)
    found = [unit_bytes([layers[number] for number in unit], context.dp_shard) for unit in units]
    gathered, travelling = tuple(size for size, _ in found), tuple(buffer for _, buffer in found)
    scattered = frozenset(unit for unit, size in enumerate(gathered) if size) if scatters else frozenset()
    return SharedWeights(gathered, limit, scattered=scattered, travelling=travelling)
