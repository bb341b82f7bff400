"""Plan of a model's pipeline: layers and place of each chunk, and the schedules; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from megasnn.batching import micro_batches_of
from megasnn.config import ParallelConfig, PretrainConfig
from megasnn.layers.context import BuildContext
from megasnn.models.description import ModelDescription
from megasnn.parallel.agreement import broadcast_result
from megasnn.parallel.fsdp import unit_bytes
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.cost_model import PipelineCosts
from megasnn.pipeline.peak_memory import peak_moments, unit_memory
from megasnn.pipeline.profile_layers import profile_pipeline
from megasnn.pipeline.recompute import within_budget
from megasnn.schedule import ChunkCost, Kind, SchedulePlan, Simulation, plan_schedule, simulate
from megasnn.schedule.fsdp_passes import SharedWeights
from megasnn.schedule.named import looks_at_costs
from megasnn.schedule.partition import layout_to_bounds, placed_bounds
from megasnn.schedule.passes import NEVER
from megasnn.schedule.search import Forecast, forecast_named

WeightsOf = Callable[[Sequence[range]], SharedWeights]
"""Layers of each unit -> weights to gather."""
_NAMED_SHOWN = 3  # of the named schedules, the fastest ones


@dataclass(frozen=True)
class PipelinePlan:
    """Partition and schedules of a run.

    Attributes:
        bounds: layers of each chunk.
        schedules: for any number of micro-batches; carries those decided on for the numbers of a step.
        micro_batches: of a usual step.
        costs: measured; None where nobody needed them.
        named: forecasts of the named schedules, each on its own partition; empty without costs.
        memory_budget: MB, as it was asked for.
        weight_ranks: number of replicas that share one copy of the weights.
    """

    bounds: tuple[range, ...]
    schedules: SchedulePlan
    micro_batches: int
    costs: PipelineCosts | None = None
    named: tuple[Forecast, ...] = ()
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
        costs = self.costs.of_chunks(self.executed_bounds, self.schedules.executed_placement)
        weights = self.schedules.weights
        if weights is not None:
            costs = self.costs.with_unshards(costs, weights.unit_bytes, self.weight_ranks)
        return simulate(self.schedules.training(micro_batches), costs)

    def forecast(self, micro_batches: int) -> Forecast | None:
        """`simulation` in short."""
        result = self.simulation(micro_batches)
        return None if result is None else Forecast.of(self.schedules.training(micro_batches).name, result)

    def describe(self, asked: str) -> list[str]:
        """Lines about the choice and its alternatives; none without costs. Args: asked: name of the schedule."""
        chosen = self.forecast(self.micro_batches)
        if chosen is None:
            return []
        named = [f"{each.name} {_in_short(each)}" for each in self.named[:_NAMED_SHOWN]]
        if len(self.named) > _NAMED_SHOWN:
            named.append(f"{len(self.named) - _NAMED_SHOWN} slower ones")
        return [
            f"--pipeline-schedule {asked}: {chosen.name}, predicted for {self.micro_batches} micro-batches "
            f"{_in_short(chosen)}, {chosen.activations:g} micro-batches' activations",
            "  named ones: " + ", ".join(named),
        ]

    def describe_recompute(self) -> list[str]:
        """A line about forwards that are computed again, and with a budget, what that comes to."""
        if self.schedules.recompute == NEVER and self.memory_budget is None:
            return []
        schedule = self.schedules.training(self.micro_batches)
        again = [[unit for unit, kind, _ in row if kind is Kind.RECOMPUTE] for row in schedule.actions]
        forwards = sum(map(len, self.bounds)) * self.micro_batches
        text = f"{sum(map(len, again))} of a step's {forwards} forwards of layers are computed again"
        if self.memory_budget is None or self.costs is None:
            return [f"--recompute {self.schedules.recompute}: {text}"]
        costs = self.costs.of_chunks(self.executed_bounds, self.schedules.executed_placement)
        seconds = max(sum(costs[unit].forward for unit in of_rank) for of_rank in again)
        peaks = (each.total for each in peak_moments(schedule, self.executed_bounds, self.costs))
        return [
            f"--memory-budget {self.memory_budget:g}: {text}, {1e3 * seconds:.0f} ms on the rank that does most; "
            f"predicted for a step, above weights, gradients and optimizer state: "
            f"{', '.join(f'{1e-6 * each:.0f}' for each in peaks)} MB"
        ]


def _in_short(each: Forecast) -> str:
    return f"{1e3 * each.makespan:.1f} ms ({each.idle_share:.1%} bubble)"


def plan_pipeline(
    config: PretrainConfig, model: ModelDescription, context: BuildContext, state: ParallelState, windows: int = 1
) -> PipelinePlan:
    """Profiles layers where that is needed, on all ranks, and lets the first one choose. Collective over the world.

    Args:
        windows: number of them in which each sample is shown.
    Raises:
        ValueError: on every rank, what the schedule cannot place, or a budget that it cannot keep.
    """
    training, parallel, stages, replicas = config.training, config.parallel, state.pp.size, state.dp.size
    shares = {len(micro_batches_of(training.micro_batches, replicas, each)) for each in (0, replicas - 1)}
    counts = [windows * each for each in sorted(shares, reverse=True)]
    if training.evaluate_only:  # no activation is kept, so none is recomputed; there are no other steps
        parallel = replace(parallel, recompute=NEVER, memory_budget=None)
        counts = counts[:1]
    bounds, costs, weights_of = None, None, None
    if parallel.layout is not None:
        bounds = tuple(layout_to_bounds(parallel.layout, [layer.unit for layer in model.layers]))
    elif stages == 1 and parallel.chunks_per_rank in (1, None):
        bounds = (range(len(model.layers)),)
    predicts = looks_at_costs(parallel.pipeline_schedule) or config.logging.profile_steps is not None
    if bounds is None or parallel.memory_budget is not None or stages > 1 and predicts:
        costs = profile_pipeline(model, context.largest_share(training.micro_batch_size), context, state)
    if context.dp_shard.size > 1:
        scatters = parallel.weight_gradients == "scattered"
        weights_of = partial(shared_weights, model, context=context, scatters=scatters)
    choice = partial(choose, parallel, stages, len(model.layers), counts, bounds, costs, weights_of)
    return broadcast_result(state.world.handle, choice)


def choose(
    parallel: ParallelConfig,
    stages: int,
    layers: int,
    counts: Sequence[int],
    bounds: tuple[range, ...] | None,
    costs: PipelineCosts | None,
    weights_of: WeightsOf | None = None,
) -> PipelinePlan:
    """Chooses a schedule, once in a run, for every number of micro-batches that a replica may have.

    Args:
        counts: these numbers, the usual one first.
        bounds: layers of each chunk; None: balanced by the costs.
        weights_of: where replicas shard weights; layers are executed one by one then.
    Raises:
        ValueError: what the schedule cannot place, and a budget that it cannot keep.
    """

    @cache
    def bounds_of(placement: tuple[int, ...]) -> tuple[range, ...]:
        if bounds is not None:
            return bounds
        assert costs is not None
        return tuple(placed_bounds([layer.seconds for layer in costs.layers], placement))

    @cache
    def costs_of(placement: tuple[int, ...]) -> Sequence[ChunkCost]:
        assert costs is not None
        return costs.of_chunks(bounds_of(placement), placement, parallel.recompute != NEVER)

    chunks = parallel.chunks_per_rank
    if bounds is not None:
        chunks = len(bounds) // stages
    elif chunks is None and 2 * stages > layers:
        chunks = 1
    plan = plan_schedule(parallel.pipeline_schedule, stages, chunks, counts[0], None if costs is None else costs_of)
    plan = replace(plan, decided=tuple(plan.of_chunks(count) for count in dict.fromkeys(counts)))
    cut = bounds_of(plan.placement)
    if parallel.recompute != NEVER or weights_of is not None:
        plan = plan.in_units(cut, parallel.recompute)
    if parallel.memory_budget is not None and costs is not None:
        refined = plan.in_units(cut, NEVER)
        memory = unit_memory(costs, refined.unit_bounds(cut))
        again = within_budget(refined.training(counts[0]), memory, 1e6 * parallel.memory_budget)
        plan = replace(refined, chosen=again) if again else plan
    if weights_of is not None:
        plan = plan.sharing(weights_of(plan.unit_bounds(cut)), counts)
    named: list[Forecast] = []
    if costs is not None:
        shown = (1, 2)[: layers // stages] if bounds is None else (len(bounds) // stages,)
        named = forecast_named(stages, counts[0], costs_of, shown)
    ranks = parallel.weight_parallel_size
    return PipelinePlan(cut, plan, counts[0], costs, tuple(named), parallel.memory_budget, ranks)


def shared_weights(
    model: ModelDescription, units: Sequence[range], context: BuildContext, scatters: bool = False
) -> SharedWeights:
    """Weights that replicas shard by rows, of each unit; nothing gets memory for that.

    Args:
        units: layers of each.
        scatters: gradients are scattered after every micro-batch.
    """
    layers = [each.module for each in model.build(context)]
    found = [unit_bytes([layers[number] for number in unit], context.dp_shard) for unit in units]
    gathered, travelling = tuple(size for size, _ in found), tuple(buffer for _, buffer in found)
    scattered = frozenset(unit for unit, size in enumerate(gathered) if size) if scatters else frozenset()
    return SharedWeights(gathered, scattered, travelling)
