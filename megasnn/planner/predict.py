"""Time and memory of a step on a layout, by simulating one replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from megasnn.batching import micro_batches_of
from megasnn.pipeline.cost_model import PipelineCosts
from megasnn.pipeline.peak_memory import peak_moments
from megasnn.planner.bounds import Bounds
from megasnn.planner.candidates import Layout
from megasnn.planner.memory import MemoryForecast, bucket_bytes, gathered_bytes, travelling_bytes
from megasnn.schedule import ChunkCost, Schedule, SchedulePlan, Simulation, plan_schedule, simulate
from megasnn.schedule.actions import FINISHING
from megasnn.schedule.fsdp_passes import SharedWeights
from megasnn.schedule.passes import NEVER


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        pipeline: forwards and backwards, with all that holds them up.
        reduction: what is left of gradients' sums behind them.
        agreement: all ranks wait for each other with loss and norm. update: the optimizer. sharing: rows that owners
            then give to the others.
    """

    pipeline: float
    reduction: float
    agreement: float
    update: float
    sharing: float

    @property
    def total(self) -> float:
        return self.pipeline + self.reduction + self.agreement + self.update + self.sharing


@dataclass(frozen=True)
class Predicted:
    """Attributes: memory: of each pipeline rank. bounds: layers of each chunk. idle: share of the ranks' time."""

    time: StepTime
    memory: tuple[MemoryForecast, ...]
    bounds: tuple[range, ...]
    idle: float
    schedule: Schedule
    simulation: Simulation


class Predictor(Bounds):
    """Predictor of a model's step on a cluster, layout by layout: at least, and simulated."""

    def predict(self, layout: Layout) -> Predicted:
        """By the simulation of one replica. Raises ValueError for what the schedule cannot place or keep."""
        costs, bounds, count = self.costs(layout), self.bounds(layout), self.micro_batches(layout)
        plan = self._schedule_plan(layout, bounds, costs, count)
        schedule, executed = plan.training(count), plan.unit_bounds(bounds)
        of_units = costs.of_chunks(executed, plan.executed_placement)
        if plan.weights is not None:
            of_replicas = replace(costs, link=self._cluster.link(layout.grid, "dp_shard"))
            of_units = of_replicas.with_unshards(of_units, plan.weights.unit_bytes, layout.grid.dp_shard)
        result = simulate(schedule, of_units)
        states = self.states(layout)
        sums = [self.sums(layout, each.reduced, each.updated) for each in states]
        update = max(each.updated for each in states) * self._cluster.machine.update
        time = StepTime(
            pipeline=result.makespan,
            reduction=max(self._exposed(layout, rank, result) for rank in range(layout.grid.pp)),
            agreement=self.agreement(layout),
            update=update,
            sharing=max(each.sharing for each in sums),
        )
        memory = self._memory(layout, plan, schedule, executed, costs)
        return Predicted(time, memory, bounds, result.idle_share, schedule, result)

    def _exposed(self, layout: Layout, rank: int, result: Simulation) -> float:
        """Seconds of a rank's sums behind the last action of all ranks.

        Gradients travel in buckets of equal size, the first when its part of the last micro-batch's backward is done,
        and the last behind the rank's own last backward. Ranks that keep the same rows sum theirs behind all.
        """
        states, shares = self.states(layout)[rank], layout.grid.dp_shard > 1
        count = max(1, -(-states.reduced // bucket_bytes(self._on_gpu)))
        sums = self.sums(layout, states.reduced // count, states.updated // count)
        each = sums.to_keepers if shares else sums.over_copies
        ends = {timed.action.chunk: timed for timed in result.timeline[rank] if timed.action.kind in FINISHING}
        first = min(timed.start + (timed.end - timed.start) / count for timed in ends.values())
        last = max(timed.end for timed in ends.values())
        free = max(last + each, first + count * each)
        return max(0.0, free - result.makespan) + (count * sums.over_copies if shares else 0.0)

    def _schedule_plan(
        self, layout: Layout, bounds: tuple[range, ...], costs: PipelineCosts, count: int
    ) -> SchedulePlan:
        def costs_of(placement: tuple[int, ...]) -> Sequence[ChunkCost]:
            return costs.of_chunks(self.bounds(layout, placement), placement, layout.recompute != NEVER)

        plan = plan_schedule(layout.schedule, layout.grid.pp, layout.chunks, count, costs_of)
        counts = [count]
        if layout.grid.dp_shard > 1:  # which cannot be where replicas would gather in other orders
            all_of_step, replicas = self._config.training.micro_batches, layout.grid.replicas
            counts = list(dict.fromkeys([count, len(micro_batches_of(all_of_step, replicas, replicas - 1))]))
        plan = replace(plan, decided=tuple(map(plan.of_chunks, counts)))
        if layout.recompute != NEVER or layout.grid.dp_shard > 1:
            plan = plan.in_units(bounds, layout.recompute)
        if layout.grid.dp_shard > 1:
            tensors, ranks = self.tensors(layout), layout.grid.dp_shard
            units = [list(chain(*(tensors[i] for i in span))) for span in plan.unit_bounds(bounds)]
            travelling = tuple(travelling_bytes(unit, ranks) for unit in units)
            plan = plan.sharing(SharedWeights(tuple(map(gathered_bytes, units)), travelling=travelling), counts)
        return plan

    def _memory(
        self, layout: Layout, plan: SchedulePlan, schedule: Schedule, executed: Sequence[range], costs: PipelineCosts
    ) -> tuple[MemoryForecast, ...]:
        found, states = [], self.states(layout)
        peaks = peak_moments(schedule, executed, costs, [each.exchanged for each in states])
        for rank, (mine, peak) in enumerate(zip(states, peaks, strict=True)):
            gathered = buffers = 0
            if plan.weights is not None:
                gathered, buffers = plan.weights.gathered_and_buffers(schedule, rank)
            found.append(
                MemoryForecast(
                    program=1e-6 * self._cluster.machine.program,
                    weights=1e-6 * (mine.weights + buffers),
                    gradients=1e-6 * mine.gradients,
                    optimizer=1e-6 * mine.optimizer,
                    kept=1e-6 * peak.kept,
                    working=1e-6 * peak.working,
                    messages=1e-6 * peak.messages,
                    samples=1e-6 * self.samples(layout, rank),
                    gathered=1e-6 * gathered,
                    update=1e-6 * max(0, mine.working - peak.total - gathered),
                )
            )
        return tuple(found)
