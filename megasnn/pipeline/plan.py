"""Plan of a model's pipeline: layers and place of each chunk, and the schedules; the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from megasnn.layers.context import BuildContext
from megasnn.models.description import ModelDescription
from megasnn.parallel.agreement import broadcast_object
from megasnn.parallel.collectives import exchange_bytes
from megasnn.parallel.fsdp import gathered_bytes, travelling_bytes
from megasnn.parallel.gradient_buckets import BUCKET_BYTES, GradientBuckets
from megasnn.parallel.sharding import copied_tensors, sharded_tensors
from megasnn.parallel_state import Group, ParallelState
from megasnn.pipeline.choose_schedule import Candidate, ExchangedOf, PipelineRequest, choose_schedule, executed_costs
from megasnn.pipeline.cost_model import PipelineCosts
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.peak_memory import peak_moments
from megasnn.pipeline.profile_layers import profile_pipeline
from megasnn.schedule import ChunkCost, Kind, SchedulePlan, Simulation, simulate
from megasnn.schedule.fsdp_passes import SharedWeights
from megasnn.schedule.named import looks_at_costs
from megasnn.schedule.passes import NEVER
from megasnn.schedule.search import Forecast

_NAMED_SHOWN = 3  # of the named schedules, the fastest ones


@dataclass(frozen=True)
class PipelinePlan:
    """Partition and schedules of a run.

    Attributes:
        bounds: layers of each chunk.
        schedules: for any number of micro-batches; carries those decided on for the request's numbers.
        micro_batches: of a usual step.
        costs: measured; None where nobody needed them.
        named: forecasts of the named schedules, each on its own partition; empty without costs.
        compared: schedules that were compared for a budget, or for weights that replicas shard.
        memory_budget: as it was asked for.
        weight_ranks: number of replicas that share one copy of the weights.
        exchanged: bytes that travel to and from those who own rows, on each pipeline rank; empty where rows have no
            owners, or there is no budget.
    """

    bounds: tuple[range, ...]
    schedules: SchedulePlan
    micro_batches: int
    costs: PipelineCosts | None = None
    named: tuple[Forecast, ...] = ()
    compared: tuple[Candidate, ...] = ()
    memory_budget: float | None = None
    weight_ranks: int = 1
    exchanged: tuple[int, ...] = ()

    @property
    def executed_bounds(self) -> list[range]:
        """Layers of each unit, which is what a schedule that is executed calls a chunk."""
        return self.schedules.unit_bounds(self.bounds)

    def simulation(self, micro_batches: int) -> Simulation | None:
        """Simulation of a step of so many micro-batches, in seconds; None without costs."""
        if self.costs is None:
            return None
        return simulate(self.schedules.training(micro_batches), self._chunk_costs(self.costs), self.schedules.wholes)

    def forecast(self, micro_batches: int) -> Forecast | None:
        """`simulation` in short."""
        result = self.simulation(micro_batches)
        return None if result is None else Forecast.of(self.schedules.training(micro_batches).name, result)

    def step_bytes(self, micro_batches: int) -> list[int]:
        """Most bytes that a step needs at once on each pipeline rank, above weights, gradients and optimizer state.

        Activations, the computation under way, and tensors in transfer between stages and, with a budget, to and from
        those who own rows. Raises ValueError without costs.
        """
        if self.costs is None:
            raise ValueError("the memory of layers was not measured")
        schedule = self.schedules.training(micro_batches)
        return [peak.total for peak in peak_moments(schedule, self.executed_bounds, self.costs, self.exchanged)]

    def describe(self, asked: str) -> list[str]:
        """Lines about the choice and its alternatives; none without costs.

        Args:
            asked: the name of the schedule that was asked for.
        """
        chosen = self.forecast(self.micro_batches)
        if chosen is None:
            return []
        lines = [
            f"--pipeline-schedule {asked}: {chosen.name}, predicted for {self.micro_batches} micro-batches "
            f"{_in_short(chosen)}, at most {chosen.activations:g} micro-batches' activations on a rank"
        ]
        named = [f"{each.name} {_in_short(each)}" for each in self.named[:_NAMED_SHOWN]]
        if len(self.named) > _NAMED_SHOWN:
            named.append(f"{len(self.named) - _NAMED_SHOWN} slower ones")
        lines.append("  named ones: " + ", ".join(named))
        if self.compared:
            budget = "" if self.memory_budget is None else f"within --memory-budget {1e-6 * self.memory_budget:g}"
            shards = "" if self.weight_ranks == 1 else f"with --weight-parallel-size {self.weight_ranks}"
            whole = [f"{each.name} {_whole(each)}" for each in self.compared]
            conditions = " ".join(filter(None, (budget, shards)))
            lines.append(f"  compared {conditions}: {', '.join(whole)}; no other one is faster")
        return lines

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

    def describe_recompute(self) -> list[str]:
        """A line about forwards that are computed again, and with a budget, what that comes to."""
        if self.schedules.recompute == NEVER and self.memory_budget is None:
            return []
        repeated, layers = self.repeated(), sum(map(len, self.bounds))
        count = sum(len(each) for of_rank in repeated for each in of_rank.values())
        what = f"{count} of a step's {layers * self.micro_batches} forwards of layers are computed again"
        if self.memory_budget is None or self.costs is None:
            return [f"--recompute {self.schedules.recompute}: {what}"]
        costs = self._chunk_costs(self.costs)
        seconds = [sum(len(each) * costs[u].time(Kind.RECOMPUTE) for u, each in of.items()) for of in repeated]
        peaks = ", ".join(f"{1e-6 * each:.0f}" for each in self.step_bytes(self.micro_batches))
        return [
            f"--memory-budget {1e-6 * self.memory_budget:g}: {what}, {1e3 * max(seconds):.0f} ms on the rank that does "
            f"most; predicted for a step, above weights, gradients and optimizer state: {peaks} MB"
        ]

    def _chunk_costs(self, costs: PipelineCosts) -> list[ChunkCost]:
        return executed_costs(self.schedules, self.bounds, costs, self.weight_ranks)


def _in_short(each: Forecast) -> str:
    return f"{1e3 * each.makespan:.1f} ms ({each.idle_share:.1%} bubble)"


def _whole(each: Candidate) -> str:
    whole = "not possible" if each.whole is None else f"{1e3 * each.whole:.1f} ms"
    return f"{whole} ({1e3 * each.alone:.1f} ms without)"


def plan_pipeline(
    model: ModelDescription,
    request: PipelineRequest,
    context: BuildContext,
    state: ParallelState,
    wires: WireOptions,
    costs: PipelineCosts | None = None,
) -> PipelinePlan:
    """Profiles layers where that is needed, on all ranks, and lets the first one choose. Collective over the world.

    Args:
        costs: measured before, the same on every rank.
    Raises:
        ValueError: on every rank, what the schedule cannot place, or a budget that it cannot keep.
    """
    stages, bounds, ranks = state.pipeline.size, request.bounds, context.weight.size
    if bounds is None and stages == 1 and request.chunks_per_rank in (1, None):
        bounds = (range(len(model.layers)),)
    needs_costs = bounds is None or request.predicts or request.memory_budget is not None
    needs_costs |= stages > 1 and looks_at_costs(request.schedule)
    if needs_costs and costs is None:
        costs = profile_pipeline(model, request.micro_batch_size, context, state, wires, request.repeats)
    request = replace(request, bounds=bounds)
    weights = partial(shared_weights, model, context=context, scatters=request.scatters)
    exchanged_of: ExchangedOf | None = None
    if request.memory_budget is not None and request.rows_have_owners and state.dp_replicate_cp.size > 1 and ranks == 1:
        exchanged_of = partial(exchanged_with_owners, model, context, state.dp_replicate_cp, state.device)
    choice = broadcast_object(
        state.world,
        lambda: choose_schedule(
            request, stages, len(model.layers), costs, None if ranks == 1 else weights, ranks, exchanged_of
        ),
    )
    exchanged = () if exchanged_of is None else tuple(exchanged_of(choice.bounds, choice.schedules.placement))
    return PipelinePlan(
        choice.bounds,
        choice.schedules,
        request.micro_batches[0],
        costs,
        choice.named,
        choice.compared,
        request.memory_budget,
        ranks,
        exchanged,
    )


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
        scatters: whether gradients are scattered after every micro-batch.
    """
    layers = model.build(context)
    unit_bytes = tuple(gathered_bytes([layers[number] for number in unit]) for unit in units)
    travelling = tuple(travelling_bytes([layers[number] for number in unit], context.weight) for unit in units)
    scattered = frozenset(unit for unit, size in enumerate(unit_bytes) if size) if scatters else frozenset()
    return SharedWeights(unit_bytes, limit, scattered=scattered, travelling=travelling)


def exchanged_with_owners(
    model: ModelDescription,
    context: BuildContext,
    copies: Group,
    device: torch.device,
    bounds: Sequence[range],
    placement: Sequence[int],
) -> list[int]:
    """Bytes that travel between a rank and those who own rows of its parameters, behind all backwards, on each pipeline
    rank; nothing gets memory for that.

    Args:
        copies: ranks that own rows. device: of the buckets.
        bounds: layers of each chunk. placement: its rank.
    """
    layers = model.named_layers(context)
    most = exchange_bytes(copies, device, BUCKET_BYTES)
    found = [0] * (max(placement) + 1)
    # Rows are dealt out nearly evenly: the first rank or the last one has most.
    for owner in (replace(copies, rank=rank) for rank in {0, copies.size - 1}):
        for rank, size in enumerate(found):
            tensors = []
            for chunk, span in enumerate(bounds):
                if placement[chunk] == rank:
                    mine = layers[span.start : span.stop]
                    tensors.append((chunk, [*sharded_tensors(mine), *copied_tensors(mine)]))
            buckets = GradientBuckets(tensors, owner, context.tensor, most, rows_have_owners=True)
            found[rank] = max(size, buckets.exchanged_bytes)
    return found
