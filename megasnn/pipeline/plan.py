"""Pipeline plan: each chunk's layers and pipeline rank, and the schedules. Equal on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain

from torch import nn

from megasnn.common.files import quantity
from megasnn.common.grid import micro_batch_counts
from megasnn.config import ParallelConfig, PretrainConfig
from megasnn.layers.context import BuildContext
from megasnn.models.description import Built, ModelDescription
from megasnn.parallel.agreement import broadcast_result
from megasnn.parallel.bucket_sizes import Gradient, exchanges_of, peak_exchange_bytes
from megasnn.parallel.fsdp import segment_bytes
from megasnn.pipeline.cost_model import PipelineCosts
from megasnn.pipeline.kept_costs import pipeline_costs
from megasnn.pipeline.peak_memory import MB, segment_memory, within_budget
from megasnn.schedule import ChunkCost, Kind, ScheduleChoice, Simulation, plan_schedule, simulate
from megasnn.schedule.named import looks_at_costs
from megasnn.schedule.partition import layout_to_bounds, placed_bounds
from megasnn.schedule.passes import NEVER, SharedWeights

WeightsOf = Callable[[Sequence[range]], SharedWeights]
"""Layers of each segment -> weights to gather."""
ExchangedOf = Callable[[Sequence[range]], int]
"""Layers of a rank's chunks -> peak bytes of the exchange of their gradients."""


@dataclass(frozen=True)
class PipelinePlan:
    """A run's partition and schedules.

    Attributes:
        schedules: for any number of micro-batches, fixed for training steps.
        micro_batches: in a usual step.
        costs: measured costs; None if no decision needed them.
    """

    bounds: tuple[range, ...]
    schedules: ScheduleChoice
    micro_batches: int
    costs: PipelineCosts | None = None

    @property
    def segment_bounds(self) -> list[range]:
        return self.schedules.segment_bounds(self.bounds)

    def simulation(self, micro_batches: int) -> Simulation | None:
        """One step, in seconds; None without costs."""
        if self.costs is None:
            return None
        costs = self.costs.of_chunks(self.segment_bounds, self.schedules.segment_placement)
        weights = self.schedules.weights
        if weights is not None:
            costs = self.costs.with_unshards(costs, weights.segment_bytes, weights.ranks)
        return simulate(self.schedules.training(micro_batches), costs)

    def describe(self, asked: ParallelConfig) -> list[str]:
        lines = []
        count = self.micro_batches
        schedule = self.schedules.training(count)
        result = self.simulation(count)
        if result is not None:
            lines.append(
                f"--pipeline-schedule {asked.pipeline_schedule}: {schedule.name}, predicted for "
                f"{quantity(count, 'micro-batch')} {1e3 * result.makespan:.1f} ms ({result.idle_share:.1%} bubble)"
            )
        if self.costs is not None and self.costs.kept_in:
            lines.append(f"costs of the layers are those of an earlier start, in {self.costs.kept_in}")
        recomputed = sum(action.kind is Kind.RECOMPUTE for action in chain.from_iterable(schedule.actions))
        if recomputed:
            flag = f"--recompute {asked.recompute}"
            if asked.memory_budget is not None:
                flag = f"--memory-budget {asked.memory_budget:g}"
            forwards = sum(map(len, self.bounds)) * count
            lines.append(f"{flag}: {recomputed} of a step's {forwards} forwards of layers are computed again")
        return lines


def plan_pipeline(
    config: PretrainConfig,
    description: ModelDescription,
    context: BuildContext,
    built: Sequence[Built],
) -> PipelinePlan:
    """Profiles the layers on all ranks if a decision needs costs; the first rank decides. Collective.
    Raises:
        ValueError: on every rank, as `choose_plan`.
    """
    training = config.training
    parallel = config.parallel
    state = context.state
    stages = state.pp.size
    batch_size = training.global_batch_size
    of_replicas = micro_batch_counts(batch_size, training.micro_batch_size, state.dp.size, config.windows)
    counts = of_replicas.distinct
    if training.evaluate_only:
        # Evaluation stores no activations, and has no training steps with another number of micro-batches.
        parallel = replace(parallel, recompute=NEVER, memory_budget=None)
        counts = (of_replicas.most,)
    bounds = None
    costs = None
    weights_of = None
    exchanged_of = None
    if parallel.layout is not None:
        bounds = tuple(layout_to_bounds(parallel.layout, [layer.layer_group for layer in description.layers]))
    elif stages == 1 and parallel.chunks_per_rank in (1, None):
        bounds = (range(len(description.layers)),)
    decides = stages > 1 and looks_at_costs(parallel.pipeline_schedule)
    if bounds is None or parallel.memory_budget is not None or decides:
        # Measuring takes seconds, and is left out where no decision depends on it.
        costs = pipeline_costs(description, built, config, context)
    if state.dp_shard.size > 1:
        layers = [each.module for each in built]
        weights_of = partial(
            shared_weights,
            layers,
            ranks=state.dp_shard.size,
            scatters=parallel.weight_gradients == "scattered",
            reshard_after_forward=parallel.reshard_after_forward,
        )
    if parallel.memory_budget is not None:
        ranks = state.dp_shard.size
        if ranks == 1 and parallel.use_distributed_optimizer:
            ranks = state.dp_replicate_cp.size
        exchanged_of = partial(_exchanged_bytes, built, ranks=ranks, on_gpu=state.device.type != "cpu")
    choose_here = partial(
        choose_plan,
        parallel,
        stages=stages,
        layers=len(description.layers),
        counts=counts,
        bounds=bounds,
        costs=costs,
        weights_of=weights_of,
        exchanged_of=exchanged_of,
    )
    return broadcast_result(state.world.handle, choose_here)


def choose_plan(
    parallel: ParallelConfig,
    *,
    stages: int,
    layers: int,
    counts: Sequence[int],
    bounds: tuple[range, ...] | None,
    costs: PipelineCosts | None,
    weights_of: WeightsOf | None = None,
    exchanged_of: ExchangedOf | None = None,
) -> PipelinePlan:
    """Chooses a run's schedule.

    Args:
        counts: possible micro-batches in a replica's step, the usual number first.
        bounds: each chunk's layers; None to balance them by cost.
        weights_of: weights shared by replicas. Segments are then single layers.
        exchanged_of: gradient bytes exchanged between replicas, for a memory budget.
    Raises:
        ValueError: layers that the schedule cannot place, or a budget that it cannot keep.
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
    chosen = plan_schedule(parallel.pipeline_schedule, stages, chunks, counts[0], None if costs is None else costs_of)
    decided = replace(chosen, decided=tuple(chosen.of_chunks(count) for count in dict.fromkeys(counts)))
    cut = bounds_of(chosen.placement)
    refined = decided
    if parallel.recompute != NEVER or weights_of is not None:
        refined = decided.in_segments(cut, parallel.recompute)
    affordable = refined
    if parallel.memory_budget is not None and costs is not None:
        affordable = _within_budget(parallel.memory_budget, refined, cut, costs, counts[0], exchanged_of)
    schedules = affordable
    if weights_of is not None:
        schedules = affordable.sharing(weights_of(affordable.segment_bounds(cut)), counts)
    return PipelinePlan(cut, schedules, counts[0], costs)


def _within_budget(
    budget: float,
    choice: ScheduleChoice,
    bounds: Sequence[range],
    costs: PipelineCosts,
    micro_batches: int,
    exchanged_of: ExchangedOf | None,
) -> ScheduleChoice:
    """The choice, with recomputed segments where the budget needs them. Raises ValueError as `within_budget`."""
    refined = choice.in_segments(bounds, NEVER)
    memory = segment_memory(costs, refined.segment_bounds(bounds))
    exchanged = []
    if exchanged_of is not None:
        for rank in range(choice.stages):
            spans = [span for span, owner in zip(bounds, choice.placement, strict=True) if owner == rank]
            exchanged.append(exchanged_of(spans))
    recomputed = within_budget(refined.training(micro_batches), memory, MB * budget, exchanged)
    # Without a recomputation whole chunks suffice: they take fewer actions than their layers.
    return replace(refined, chosen=recomputed) if recomputed else choice


def _exchanged_bytes(built: Sequence[Built], spans: Sequence[range], ranks: int, on_gpu: bool) -> int:
    """Peak bytes while shard owners exchange gradients.

    Args:
        spans: a pipeline rank's layers, by chunk.
        ranks: owners of one parameter's shards; 1 without shards.
    """
    exchanges: list[int] = []
    for span in spans:
        gradients = []
        for layer in built[span.start : span.stop]:
            for parameter in layer.module.parameters():
                if parameter.requires_grad:
                    rows = len(parameter) if parameter.ndim else 1
                    gradients.append(Gradient(parameter.nbytes, rows, parameter.dtype))
        gradients.reverse()
        exchanges += exchanges_of(gradients, ranks, on_gpu)
    return peak_exchange_bytes(exchanges)


def shared_weights(
    layers: Sequence[nn.Module],
    segments: Sequence[range],
    ranks: int,
    scatters: bool = False,
    reshard_after_forward: bool = True,
) -> SharedWeights:
    """Shared weight bytes in each segment, gathered before use.

    Args:
        layers: all layers, with or without memory.
    """
    gathered = []
    for segment in segments:
        gathered.append(segment_bytes([layers[number] for number in segment]))
    scattered = frozenset[int]()
    if scatters:
        scattered = frozenset(number for number, size in enumerate(gathered) if size)
    return SharedWeights(tuple(gathered), scattered, ranks, reshard_after_forward)
