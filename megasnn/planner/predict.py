"""Time and memory of a step on a layout: estimated for a hundred thousand layouts, simulated for a few of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import chain
from typing import NamedTuple

from megasnn.common.grid import micro_batch_counts
from megasnn.config import PretrainConfig
from megasnn.config.training import PRECISIONS
from megasnn.parallel.bucket_sizes import bucket_bytes
from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts
from megasnn.pipeline.memory_forecast import MemoryForecast, forecast, sample_bytes
from megasnn.pipeline.peak_memory import peak_moments, segment_memory
from megasnn.planner.candidates import Layout
from megasnn.planner.costs import Analysis, LayerShare, layer_costs, resident_tensors
from megasnn.planner.machines import Cluster
from megasnn.planner.memory import PlannedStates, gathered_bytes, states_of
from megasnn.schedule import (
    ChunkCost,
    Kind,
    Schedule,
    ScheduleChoice,
    generate,
    per_stage,
    plan_schedule,
    simulate,
)
from megasnn.schedule.actions import crosses
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.partition import placed_bounds
from megasnn.schedule.passes import AT_ONCE, NEVER, SharedWeights

ITEM_SIZES = {"float32": 4, "float64": 8, "bfloat16": 2}
Placement = tuple[int, ...]


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
        return sum(vars(self).values())


@dataclass(frozen=True)
class Predicted:
    """
    Attributes:
        memory: of each pipeline rank. bounds: layers of each chunk. idle: share of the ranks' time.
        micro_batches: of the replica that has the most.
    """

    time: StepTime
    memory: tuple[MemoryForecast, ...]
    bounds: tuple[range, ...]
    idle: float
    micro_batches: int


class Stage(NamedTuple):
    """Layers of a pipeline rank, and costs of one micro-batch.

    Attributes:
        spans: layers of each chunk.
        seconds, backward: to compute all, and the backward of that.
        stashed: bytes that forwards leave for the backward. deferred: that this leaves for a weight gradient of its
            own.
        working: that the largest layer computes with. messages: to and from other ranks.
    """

    spans: tuple[range, ...]
    seconds: float
    backward: float
    stashed: int
    deferred: int
    working: int
    messages: int


class Predictor:
    """Predictor of a model's step on a cluster, layout by layout: estimated, and simulated."""

    def __init__(self, analysis: Analysis, config: PretrainConfig, cluster: Cluster) -> None:
        self._config, self._cluster = config, cluster
        self._on_gpu = cluster.machine.kind == "cuda"
        self._resident = lru_cache(maxsize=None)(partial(resident_tensors, analysis))
        self._layers = lru_cache(maxsize=None)(partial(layer_costs, analysis, cluster.machine))
        self._stages_of = lru_cache(maxsize=None)(self._balanced_stages)
        self._states_of = lru_cache(maxsize=None)(self._states_of_spans)
        self._segment_bytes = lru_cache(maxsize=None)(lambda tensor: [*map(gathered_bytes, self._resident(tensor))])

    def estimate(self, layout: Layout) -> tuple[float, float]:
        """Seconds of a step and bytes of its largest rank, about: stages are taken for equal where ranks wait.

        Raises ValueError as `predict`.
        """
        stages, states, count = self._stages(layout), self.states(layout), self.micro_batches(layout)
        longest, mean = max(each.seconds for each in stages), sum(each.seconds for each in stages) / len(stages)
        waits, held = self._shape(layout, stages, mean)
        waits_for_weights, gathered = self._gathers(layout, stages)
        # Others fill and drain the pipeline for the first micro-batch, then the longest stage decides.
        seconds = waits_for_weights + max(count * longest, (count - 1) * longest + (1 + waits) * mean)
        exposed, sharing = self._gradients(layout, states, stages[0].backward)
        update = max(each.updated for each in states) * self._cluster.machine.update
        splits, need = SCHEDULES[layout.schedule].looks_at_costs, 0.0
        for rank, (stage, of_rank) in enumerate(zip(stages, states, strict=True)):
            # Of the micro-batches that are held, about half wait for their weight gradients where these are put off.
            stashed = max(stage.stashed, (stage.stashed + stage.deferred) // 2) if splits else stage.stashed
            moment = max(held[rank] * stashed + stage.working + stage.messages, of_rank.exchanged)
            need = max(need, of_rank.resident + self.samples(layout, rank) + gathered + moment)
        return seconds + exposed + self.agreement(layout) + update + sharing, self.with_program(need)

    def predict(self, layout: Layout) -> Predicted:
        """By the simulation of one replica. Raises ValueError for what the schedule cannot place or keep."""
        costs, bounds, count = self.costs(layout), self.bounds(layout), self.micro_batches(layout)
        choice = self._schedule_choice(layout, bounds, costs, count)
        schedule, executed = choice.training(count), choice.segment_bounds(bounds)
        of_segments = costs.of_chunks(executed, choice.segment_placement)
        if choice.weights is not None:
            of_replicas = replace(costs, link=self._cluster.link(layout.grid, "dp_shard"))
            of_segments = of_replicas.with_unshards(of_segments, choice.weights.segment_bytes, layout.grid.dp_shard)
        result, states = simulate(schedule, of_segments), self.states(layout)
        exposed, sharing = self._gradients(layout, states, self._stages(layout)[0].backward)
        time = StepTime(
            pipeline=result.makespan,
            reduction=exposed,
            agreement=self.agreement(layout),
            update=max(each.updated for each in states) * self._cluster.machine.update,
            sharing=sharing,
        )
        memory = self._memory(layout, choice, schedule, executed, costs)
        return Predicted(time, memory, bounds, result.idle_share, count)

    def costs(self, layout: Layout) -> PipelineCosts:
        """Costs of all layers on a rank, and of its links. Raises ValueError for a size that cannot be."""
        return PipelineCosts(self._layers(*self._share(layout)), self._cluster.link(layout.grid, "pp"))

    def bounds(self, layout: Layout, placement: Placement | None = None) -> tuple[range, ...]:
        """Layers of each chunk, balanced by their seconds."""
        return _balanced(self._layers(*self._share(layout)), placement or layout.placement)

    def states(self, layout: Layout) -> list[PlannedStates]:
        """States of each pipeline rank."""
        grid, owners = layout.grid, layout.copies if layout.shards_optimizer else 1
        return [self._states_of(each.spans, grid.tp, grid.dp_shard, owners) for each in self._stages(layout)]

    def samples(self, layout: Layout, rank: int) -> int:
        """Bytes of images, which the first stage has."""
        if rank != layout.placement[0]:
            return 0
        itemsize = ITEM_SIZES[PRECISIONS[self._config.training.precision].weights]
        samples = layout.micro_batch_size if self._config.data.mixes else layout.own_samples
        return sample_bytes(self._config, itemsize, self.micro_batches(layout), samples, not self._on_gpu)

    def micro_batches(self, layout: Layout) -> int:
        """Micro-batches of the replica that has the most."""
        return self._counts(layout)[0]

    def _counts(self, layout: Layout) -> tuple[int, ...]:
        batch = self._config.training.global_batch_size
        return micro_batch_counts(batch, layout.micro_batch_size, layout.grid.replicas)

    def agreement(self, layout: Layout) -> float:
        """Seconds of what a step reads, which is a sum over all ranks of a few numbers."""
        machine = self._cluster.machine
        link = machine.within if layout.ranks <= self._cluster.ranks_of_node else machine.between
        return link.all_reduce(layout.ranks, 0, self._on_gpu)

    def without_samples(self, layout: Layout) -> float:
        """Bytes of the largest rank that do not depend on the size of micro-batches."""
        return self.with_program(max(each.resident for each in self.states(layout)))

    def with_program(self, tensors: float) -> float:
        """Bytes of a rank whose tensors take so many."""
        machine = self._cluster.machine
        return machine.program + tensors * (1 + machine.rest)

    def _share(self, layout: Layout) -> tuple[LayerShare, LinkCost]:
        """Share of a rank, and the slowest link between ranks that share layers with it."""
        grid, at_work = layout.grid, min(layout.ranks, self._cluster.ranks_of_node)
        share = LayerShare(grid.tp, grid.cp, layout.cut, layout.own_samples, at_work)
        return share, self._cluster.link(grid, "cp")  # tensor parallel ranks are neighbours

    def _stages(self, layout: Layout) -> list[Stage]:
        return self._stages_of(*self._share(layout), layout.placement, layout.recompute != NEVER)

    def _balanced_stages(
        self, share: LayerShare, link: LinkCost, placement: Placement, recomputes: bool
    ) -> list[Stage]:
        layers = self._layers(share, link)
        bounds, costs = _balanced(layers, placement), PipelineCosts(layers, LinkCost())
        segments = segment_memory(costs, [range(i, i + 1) for i in range(len(layers))])
        crossed = [chunk for chunk in range(len(placement)) if crosses(placement, chunk)]
        found = []
        for rank in range(max(placement) + 1):
            spans = tuple(span for span, home in zip(bounds, placement, strict=True) if home == rank)
            mine = list(chain(*spans))
            forward = sum(layers[i].forward for i in mine)
            # The last layer of a chunk goes backward right behind its forward.
            again = sum(layers[i].forward for span in spans for i in span[:-1]) if recomputes else 0.0
            backward = again + sum(layers[i].seconds for i in mine) - forward
            stashed = sum(segments[i].entering if recomputes else segments[i].resident for i in mine)
            working = max(segments[i].working[Kind.BACKWARD] + recomputes * segments[i].resident for i in mine)
            working += sum(segments[i].cast for i in mine)
            sides = (bounds[chunk].stop - 1 for chunk in crossed if rank in placement[chunk : chunk + 2])
            messages = sum(segments[i].transfers for i in sides)
            deferred = sum(segments[i].deferred for i in mine)
            found.append(Stage(spans, forward + backward, backward, stashed, deferred, working, messages))
        return found

    def _shape(self, layout: Layout, stages: Sequence[Stage], mean: float) -> tuple[float, tuple[float, ...]]:
        """As `_step_of_equal_stages`, for a layout. Args: mean: seconds of its stages."""
        count, boundaries = self.micro_batches(layout), max(1, len(layout.placement) - 1)
        size = sum(each.messages for each in stages) / (4 * boundaries)  # two ranks, a message each way
        message = self._cluster.link(layout.grid, "pp").message(size) if len(stages) > 1 else 0.0
        share = 0.0 if message < mean / 64 else 2 ** (round(2 * math.log2(message / mean)) / 2)
        # With more micro-batches each stage computes longer, and waits no longer.
        seen, recomputes = min(count, 2 * len(stages)), layout.recompute != NEVER
        waits, held = _step_of_equal_stages(layout.schedule, len(stages), seen, layout.chunks, recomputes, share)
        return waits, (float(count),) * len(stages) if layout.schedule == "gpipe" else held

    def _gathers(self, layout: Layout, stages: Sequence[Stage]) -> tuple[float, int]:
        """Seconds that a rank waits for weights that replicas share, and bytes of two segments and their buffers."""
        ranks, link, segments = layout.grid.dp_shard, self._cluster.link(layout.grid, "dp_shard"), self._segment_bytes
        count, waits, most = self.micro_batches(layout), 0.0, 0
        for stage in stages if ranks > 1 else ():
            sizes = [size for i in chain(*stage.spans) if (size := segments(layout.grid.tp)[i])]
            all_segments = sum(link.exchange(ranks, size / ranks) for size in sizes)
            # Forwards and backwards find two segments that the one before them has used last.
            times = max(0, 1 - AT_ONCE / max(1, len(sizes)))
            forward = all_segments * (1 + (count - 1) * times) - count * (stage.seconds - stage.backward)
            waits = max(waits, max(0.0, forward) + max(0.0, all_segments * count * times - count * stage.backward))
            most = max(most, 2 * sum(sorted(sizes)[-AT_ONCE:]))
        return waits, most

    def _states_of_spans(self, spans: tuple[range, ...], tensor: int, weight: int, owners: int) -> PlannedStates:
        layers = self._resident(tensor)
        chunks = [list(chain(*layers[span.start : span.stop])) for span in spans]
        return states_of(chunks, weight, owners, self._config.optimizer, self._on_gpu)

    def _gradients(self, layout: Layout, states: Sequence[PlannedStates], backward: float) -> tuple[float, float]:
        """Seconds of the gradients' sums that are not hidden, and of the rows that owners give to the others behind.

        Gradients travel in buckets of equal size beside the backward of the last micro-batch, the last one behind it.
        Ranks that keep the same rows sum theirs behind all.
        """
        copies, weight = layout.copies, layout.grid.dp_shard
        link, keepers = (self._cluster.link(layout.grid, axis) for axis in ("dp_replicate", "dp_shard"))
        reduced, updated = max(each.reduced for each in states), max(each.updated for each in states)
        bucket_count = max(1, -(-reduced // bucket_bytes(self._on_gpu)))
        over_copies = sharing = 0.0
        if copies > 1 and layout.shards_optimizer:
            over_copies, sharing = link.exchange(copies, updated / bucket_count), link.exchange(copies, updated)
        elif copies > 1:
            over_copies = link.all_reduce(copies, reduced / bucket_count, self._on_gpu)
        each, behind = over_copies, 0.0
        if weight > 1:
            each, behind = keepers.exchange(weight, reduced / bucket_count), bucket_count * over_copies
        return max(each, bucket_count * each - backward) + behind, sharing

    def _schedule_choice(
        self, layout: Layout, bounds: tuple[range, ...], costs: PipelineCosts, count: int
    ) -> ScheduleChoice:
        def costs_of(placement: tuple[int, ...]) -> Sequence[ChunkCost]:
            return costs.of_chunks(self.bounds(layout, placement), placement, layout.recompute != NEVER)

        choice = plan_schedule(layout.schedule, layout.grid.pp, layout.chunks, count, costs_of)
        # Replicas that would gather in other orders are refused.
        counts = self._counts(layout) if layout.grid.dp_shard > 1 else (count,)
        choice = replace(choice, decided=tuple(map(choice.of_chunks, counts)))
        if layout.recompute != NEVER or layout.grid.dp_shard > 1:
            choice = choice.in_segments(bounds, layout.recompute)
        if layout.grid.dp_shard > 1:
            sizes, ranks = self._segment_bytes(layout.grid.tp), layout.grid.dp_shard
            segments = tuple(sum(sizes[i] for i in span) for span in choice.segment_bounds(bounds))
            # Others' rows come as they lie there; with more than one other, a copy in their order is made.
            choice = choice.sharing(SharedWeights(segments, ranks=ranks), counts)
        return choice

    def _memory(
        self,
        layout: Layout,
        choice: ScheduleChoice,
        schedule: Schedule,
        executed: Sequence[range],
        costs: PipelineCosts,
    ) -> tuple[MemoryForecast, ...]:
        states = self.states(layout)
        peaks = peak_moments(schedule, executed, costs, [each.exchanged for each in states])
        found = []
        for rank, (mine, peak) in enumerate(zip(states, peaks, strict=True)):
            samples = self.samples(layout, rank)
            program = self._cluster.machine.program
            found.append(forecast(mine, peak, schedule, rank, choice.weights, program=program, samples=samples))
        return tuple(found)


@cache
def _balanced(layers: tuple[LayerCost, ...], placement: Placement) -> tuple[range, ...]:
    return tuple(placed_bounds([layer.seconds for layer in layers], placement))


@cache
def _step_of_equal_stages(
    name: str, stages: int, count: int, chunks: int, recomputes: bool, message: float
) -> tuple[float, tuple[float, ...]]:
    """Time that a rank waits in a step, and micro-batches that each rank holds at most.

    Args:
        message: time of one. All times are in those that a stage computes for a micro-batch.
    """
    whole = 3 + recomputes
    costs_of = per_stage([ChunkCost(1, 1 + recomputes, 1, whole * message, whole * message)] * stages)
    schedule = generate(name, stages, count, chunks, costs_of)
    result = simulate(schedule, costs_of(schedule.placement))
    return result.makespan / whole - count, result.peak_activations
