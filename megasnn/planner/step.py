"""Time and memory of a step on a layout, by simulating one replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from megasnn.batching import micro_batches_of
from megasnn.pipeline.cost_model import PipelineCosts, with_recompute_in_backward
from megasnn.pipeline.peak_memory import peak_moments
from megasnn.pipeline.plan import executed_costs
from megasnn.planner.bounds import Bounds
from megasnn.planner.layout import Layout
from megasnn.planner.memory import MemoryForecast
from megasnn.planner.predicted import Predicted, StepTime
from megasnn.planner.reduction import gradients_complete, keepers_end, reduction_end, sums_for_keepers
from megasnn.planner.states import States, gathered_bytes, travelling_bytes
from megasnn.schedule import ChunkCost, Kind, Schedule, SchedulePlan, plan_schedule, simulate
from megasnn.schedule.fsdp_passes import SharedWeights
from megasnn.schedule.passes import NEVER


class Predictor(Bounds):
    """What a model's step takes on a cluster, layout by layout: at least, and simulated."""

    def predict(self, layout: Layout) -> Predicted:
        """By the simulation of one replica. Raises ValueError for what the schedule cannot place or keep."""
        costs, bounds = self.costs(layout), self.bounds(layout)
        count = layout.micro_batches(self._config.training.micro_batches)
        plan = self._schedule_plan(layout, bounds, costs, count)
        schedule = plan.training(count)
        executed = plan.unit_bounds(bounds)
        tensors, ranks = self._tensors(layout), range(layout.grid.pipeline)
        chunks = [[bounds[chunk] for chunk in layout.chunks_of(rank)] for rank in ranks]
        buckets = [self._sums.buckets(layout, spans, tensors) for spans in chunks]
        sums = {
            (rank, place): seconds
            for rank, summed in enumerate(buckets)
            if layout.grid.weight > 1
            for place, seconds in sums_for_keepers(schedule.actions[rank], executed, summed).items()
        }
        result = simulate(schedule, executed_costs(plan, bounds, costs, layout.grid.weight), plan.wholes, sums)
        ends = [
            keepers_end(row, {place: seconds for (of, place), seconds in sums.items() if of == rank}, buckets[rank])
            if sums
            else reduction_end(row, buckets[rank], gradients_complete(row, executed, costs.layers))
            for rank, row in enumerate(result.timeline)
        ]
        scale = self._cluster.slowest(layout.ranks)
        states = self.states(layout)
        behind = [
            (each.updated * self._cluster.machine.update, sum(bucket.sharing for bucket in summed))
            for each, summed in zip(states, buckets, strict=True)
        ]
        update = max(seconds for seconds, _ in behind)
        time = StepTime(
            pipeline=result.makespan * scale,
            reduction=max(0.0, max(ends) - result.makespan) + self._of_processor(layout, plan, schedule, states),
            agreement=self._sums.agreement(layout),
            update=update,
            sharing=max(map(sum, behind)) - update,
        )
        exchanged = [each.exchanged for each in states]
        memory = self._memory(layout, plan, schedule, executed, costs, states, exchanged)
        return Predicted(time, memory, bounds, result.idle_share, schedule, result)

    def _schedule_plan(
        self, layout: Layout, bounds: tuple[range, ...], costs: PipelineCosts, count: int
    ) -> SchedulePlan:
        def costs_of(placement: tuple[int, ...]) -> Sequence[ChunkCost]:
            found = costs.of_chunks(self._sized(layout).bounds(placement), placement)
            return found if layout.recompute == NEVER else with_recompute_in_backward(found)

        plan = plan_schedule(layout.schedule, layout.grid.pipeline, layout.chunks, count, costs_of)
        counts = [count]
        if layout.grid.weight > 1:  # which cannot be where replicas would gather in other orders
            all_of_step, replicas = self._config.training.micro_batches, layout.grid.replicas
            counts = list(dict.fromkeys([count, len(micro_batches_of(all_of_step, replicas, replicas - 1))]))
        plan = replace(plan, decided=tuple(map(plan.of_chunks, counts)))
        if layout.recompute != NEVER or layout.grid.weight > 1:
            plan = plan.in_units(bounds, layout.recompute)
        if layout.grid.weight > 1:
            tensors, ranks = self._tensors(layout), layout.grid.weight
            units = [list(chain(*(tensors[i] for i in span))) for span in plan.unit_bounds(bounds)]
            travelling = tuple(travelling_bytes(unit, ranks) for unit in units)
            plan = plan.sharing(SharedWeights(tuple(map(gathered_bytes, units)), travelling=travelling), counts)
        return plan

    def _of_processor(self, layout: Layout, plan: SchedulePlan, schedule: Schedule, states: Sequence[States]) -> float:
        """What sums take from the computing: in memory, or by the transport where every core computes."""
        copies, ways = layout.grid.data * layout.grid.context, 1 if layout.shards_optimizer else 2
        of_data, of_weight = (self._cluster.link(layout, axis) for axis in ("data", "weight"))
        size = max(each.reduced for each in states)
        if self._cluster.sums_in_memory(layout):
            return size * self._cluster.machine.summed if copies > 1 else 0.0
        summed = size * ways * (copies - 1) / copies
        shared = float(size * (layout.grid.weight - 1))
        if plan.weights is not None:
            others, unit_bytes = 1 - 1 / layout.grid.weight, plan.weights.unit_bytes
            shared += others * max(
                sum(unit_bytes[action.chunk] for action in row if action.kind is Kind.UNSHARD)
                for row in schedule.actions
            )
        return sum(
            each * (link.sender_per_byte + link.receiver_per_byte)
            for each, link in ((summed, of_data), (shared, of_weight))
        )

    def _memory(
        self,
        layout: Layout,
        plan: SchedulePlan,
        schedule: Schedule,
        executed: Sequence[range],
        costs: PipelineCosts,
        states: Sequence[States],
        exchanged: Sequence[int],
    ) -> tuple[MemoryForecast, ...]:
        found = []
        peaks = peak_moments(schedule, executed, costs, exchanged)
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
                    samples=1e-6 * self._samples(layout, rank),
                    gathered=1e-6 * gathered,
                    update=1e-6 * max(0, mine.working - peak.total - gathered),
                )
            )
        return tuple(found)
