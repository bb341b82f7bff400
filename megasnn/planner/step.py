"""Time and memory of a step on a layout: by closed bounds for many layouts, and by simulating a replica for a few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from operator import mul

from megasnn.batching import micro_batches_of
from megasnn.config import PretrainConfig
from megasnn.grid import ContextCut, Grid
from megasnn.pipeline.costs import PipelineCosts
from megasnn.pipeline.order import chunk_costs, with_forwards_again
from megasnn.pipeline.peaks import Travelling, step_peaks, under_way
from megasnn.planner.analysis import Analysis, HeldTensor
from megasnn.planner.cluster import Cluster
from megasnn.planner.costs import Links, Share, layer_costs
from megasnn.planner.layout import Layout
from megasnn.planner.memory import MemoryForecast, sample_bytes
from megasnn.planner.predicted import Predicted, StepTime
from megasnn.planner.reduction import (
    Summed,
    Sums,
    gradients_complete,
    keepers_end,
    reduction_end,
    sums_for_keepers,
)
from megasnn.planner.sized import SizedLayers
from megasnn.planner.states import States, gathered_bytes, states_of, travelling_bytes
from megasnn.precisions import PRECISIONS
from megasnn.schedule import ChunkCost, Kind, Schedule, SchedulePlan, plan_schedule, simulate
from megasnn.schedule.held import Held, held_at_backwards
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.refine import NEVER
from megasnn.schedule.weights import SharedWeights

ITEM_SIZES = {"float32": 4, "float64": 8, "bfloat16": 2}


class Predictor:
    """What a model's step takes on a cluster, layout by layout."""

    def __init__(self, analysis: Analysis, config: PretrainConfig, cluster: Cluster) -> None:
        self._analysis, self._config, self._cluster = analysis, config, cluster
        self._on_gpu = cluster.machine.kind == "cuda"
        self._sized_on = lru_cache(maxsize=None)(self._sized_of)
        self._layers = lru_cache(maxsize=None)(self._layers_of)
        self._states = lru_cache(maxsize=None)(self._states_of)
        self._states_on = lru_cache(maxsize=None)(self._states_of_ranks)
        self._sums = Sums(cluster, config.optimizer)

    def costs(self, layout: Layout) -> PipelineCosts:
        """Of all layers on a rank, and of its links. Raises ValueError for a size that cannot be."""
        cluster = self._cluster
        between, replicas = cluster.link(layout, "pipeline"), cluster.link(layout, "weight")
        return PipelineCosts(self._sized(layout).costs, between, replicas)

    def bounds(self, layout: Layout) -> tuple[range, ...]:
        """The layers of each chunk: balanced by cost."""
        return self._sized(layout).bounds(layout.placement)

    def _sized(self, layout: Layout) -> SizedLayers:
        return self._sized_on(layout.grid, layout.cut)

    def _sized_of(self, grid: Grid, cut: ContextCut) -> SizedLayers:
        layout, cluster = Layout(grid, cut), self._cluster
        links = Links(cluster.link(layout, "tensor"), cluster.link(layout, "context"))
        at_work = min(layout.ranks, cluster.ranks_of_node)
        samples = layout.own_samples(self._config.training.micro_batch_size)
        return self._layers(Share(grid.tensor, grid.context, cut, samples, at_work), links)

    def _layers_of(self, share: Share, links: Links) -> SizedLayers:
        return SizedLayers(layer_costs(self._analysis, self._cluster.machine, share, links))

    # --- bounds

    def least(self, layout: Layout) -> tuple[float, float]:
        """Seconds and bytes that a step takes at least: a rank's work and the bubble before it; states, and what the
        schedule keeps when the first backward begins, in the order that needs least."""
        chunks = self._sized(layout).chunks(self._cluster.link(layout, "pipeline"), layout.placement)
        recomputes = layout.recompute != NEVER
        count = layout.micro_batches(self._config.training.micro_batches)
        split = SCHEDULES[layout.schedule].looks_at_costs
        work, ahead = [0.0] * layout.grid.pipeline, [math.inf] * layout.grid.pipeline
        before = 0.0
        for chunk, rank in enumerate(layout.placement):
            cost = chunks.costs[chunk]
            again = chunks.again[chunk] if recomputes else 0.0
            work[rank] += cost.forward + (cost.split_backward if split else cost.backward) + again
            ahead[rank] = min(ahead[rank], before)
            before += cost.forward + (0.0 if split else cost.backward)
        busy = max(start + count * each for start, each in zip(ahead, work, strict=True))
        states = self.states(layout)
        reduced, updated = max(each.reduced for each in states), max(each.updated for each in states)
        summed = self._sums.at_once(layout, reduced, updated)
        time = busy * self._cluster.slowest(layout.ranks) + updated * self._cluster.machine.update
        time += max(0.0, summed.to_keepers + summed.over_copies - busy) + self._sums.agreement(layout) + summed.sharing
        return time, self.least_bytes(layout, first=True)

    def least_bytes(self, layout: Layout, first: bool = False) -> float:
        """That a rank needs at least when a backward begins, in the order of the schedule that needs least.

        Args:
            first: look at the first backward of each rank only, which is quick.
        """
        count, stages = layout.micro_batches(self._config.training.micro_batches), layout.grid.pipeline
        orders = held_at_backwards(layout.schedule, stages, count, layout.chunks, first)
        return self.with_program(min(self._at_backwards(layout, of_ranks) for of_ranks in orders))

    def _at_backwards(self, layout: Layout, of_ranks: Sequence[Sequence[Held]]) -> float:
        """Bytes of the tensors of the rank that needs most."""
        chunks = self._sized(layout).chunks(self._cluster.link(layout, "pipeline"), layout.placement)
        kept, of_backward = (each[layout.recompute != NEVER] for each in (chunks.kept, chunks.of_backward))
        need = 0.0
        for rank, (states, cases) in enumerate(zip(self.states(layout), of_ranks, strict=True)):
            of_mine = [kept[chunk] for chunk in layout.chunks_of(rank)]
            most = max(sum(map(mul, of_mine, held)) - kept[chunk] + of_backward[chunk] for chunk, held in cases)
            tensors = states.weights + states.gradients + states.optimizer + self._samples(layout, rank)
            need = max(need, tensors + max(most, states.exchanged))
        return need

    def without_samples(self, layout: Layout) -> float:
        """Bytes of the largest rank that do not depend on the size of micro-batches."""
        states = self.states(layout)
        return self.with_program(max(each.weights + each.gradients + each.optimizer for each in states))

    def with_program(self, tensors: float) -> float:
        """Bytes of a rank whose tensors take so many."""
        machine = self._cluster.machine
        return machine.program + tensors * (1 + machine.rest)

    def states(self, layout: Layout) -> tuple[States, ...]:
        """Of each pipeline rank. Schedules that place chunks alike have the same, with recomputation and without."""
        return self._states_on(layout.grid, layout.cut, layout.placement, layout.shards_optimizer)

    def _states_of_ranks(
        self, grid: Grid, cut: ContextCut, placement: tuple[int, ...], shards: bool
    ) -> tuple[States, ...]:
        spans: list[list[range]] = [[] for _ in range(grid.pipeline)]
        for rank, span in zip(placement, self._sized_on(grid, cut).bounds(placement), strict=True):
            spans[rank].append(span)
        # Owners differ by their number alone, and without owners replicas do not change what a rank holds.
        owners = grid.data * grid.context if shards else 1
        alike = Grid(data=owners, tensor=grid.tensor, weight=grid.weight)
        return tuple(self._states(alike, shards, tuple(each)) for each in spans)

    def _states_of(self, grid: Grid, shards: bool, spans: tuple[range, ...]) -> States:
        layout = Layout(grid, shards_optimizer=shards)
        chunks = [list(chain(*(self._tensors(layout)[i] for i in span))) for span in spans]
        return states_of(chunks, layout, self._config.optimizer, self._on_gpu)

    def _tensors(self, layout: Layout) -> Sequence[Sequence[HeldTensor]]:
        found = self._analysis.of(layout.grid.tensor, 1, "samples")
        assert found is not None, "costs were asked for before"
        return found.tensors

    def _samples(self, layout: Layout, rank: int) -> int:
        """Bytes of images, which the first stage has."""
        if rank != layout.placement[0]:
            return 0
        config = self._config
        itemsize = ITEM_SIZES[PRECISIONS[config.training.precision].weights]
        share = layout.own_samples(config.training.micro_batch_size)
        count = layout.micro_batches(config.training.micro_batches)
        return sample_bytes(config, itemsize, count, share, not self._on_gpu)

    # --- simulated

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
        result = simulate(schedule, chunk_costs(plan, bounds, costs, layout.grid.weight), plan.wholes, sums)
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
        idle = sum(result.idle) / (result.makespan * len(result.idle)) if result.makespan else 0.0
        exchanged = [
            Travelling(each.exchanged, _beside(spans, summed))
            for each, spans, summed in zip(states, chunks, buckets, strict=True)
        ]
        memory = self._memory(layout, plan, schedule, executed, costs, states, exchanged)
        return Predicted(time, memory, bounds, idle, schedule, result)

    def _schedule_plan(
        self, layout: Layout, bounds: tuple[range, ...], costs: PipelineCosts, count: int
    ) -> SchedulePlan:
        def costs_of(placement: tuple[int, ...]) -> Sequence[ChunkCost]:
            found = costs.of_chunks(self._sized(layout).bounds(placement), placement)
            return found if layout.recompute == NEVER else with_forwards_again(found)

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
                sum(unit_bytes[action.chunk] for action in row if action.kind is Kind.GATHER_WEIGHTS)
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
        exchanged: Sequence[Travelling],
    ) -> tuple[MemoryForecast, ...]:
        found = []
        peaks = step_peaks(schedule, executed, costs, exchanged)
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
                )
            )
        return tuple(found)


def _beside(spans: Sequence[range], buckets: Sequence[Summed]) -> dict[int, int]:
    """Bytes that travel to owners of rows while layers' last gradients are computed. Args: spans: a rank's chunks."""
    backwards = chain(*(reversed(span) for span in reversed(spans)))
    return under_way(backwards, [(each.layers, each.travelling) for each in buckets])
