"""A step's time and memory on a layout: a quick estimate, and a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain

from megasnn.common.grid import MicroBatchCounts, micro_batch_counts
from megasnn.config import PretrainConfig
from megasnn.config.training import PRECISIONS
from megasnn.parallel.bucket_sizes import CPU_BUCKET_BYTES, GPU_BUCKET_BYTES
from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts
from megasnn.pipeline.memory_forecast import MemoryForecast, forecast, sample_bytes
from megasnn.pipeline.peak_memory import peak_moments
from megasnn.planner.candidates import Layout
from megasnn.planner.costs import LayerShare, layer_costs, resident_tensors
from megasnn.planner.costs_file import Analysis
from megasnn.planner.machines import Cluster
from megasnn.planner.memory import PlannedStates, gathered_bytes, states_of
from megasnn.planner.stages import EqualStages, Placement, Stage, balanced_stages, bounds_by_seconds, equal_stages
from megasnn.schedule import ChunkCost, ScheduleChoice, plan_schedule, simulate
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.passes import AT_ONCE, NEVER, SharedWeights

ITEM_SIZES = {"float32": 4, "float64": 8, "bfloat16": 2}


@dataclass(frozen=True)
class StepTime:
    """A step's seconds.

    Attributes:
        pipeline: forwards and backwards, with the time ranks wait.
        reduction: gradient reduction after the last backward.
        agreement: all-reduce of loss and gradient norm.
        update: optimizer step.
        sharing: all-gather of updated shards.
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
    """A simulated step.

    Attributes:
        memory: by pipeline rank.
        idle: idle fraction of the ranks' time.
        micro_batches: largest number on a replica.
    """

    time: StepTime
    memory: tuple[MemoryForecast, ...]
    bounds: tuple[range, ...]
    idle: float
    micro_batches: int


class Predictor:
    """Predicts a model's step on a cluster for any layout."""

    def __init__(self, analysis: Analysis, config: PretrainConfig, cluster: Cluster) -> None:
        self._config = config
        self._cluster = cluster
        self._on_gpu = cluster.machine.kind == "cuda"
        # Estimating each of 100,000 layouts anew would take minutes: most share stages and states.
        self._resident = lru_cache(maxsize=None)(partial(resident_tensors, analysis))
        self._layers = lru_cache(maxsize=None)(partial(layer_costs, analysis, cluster.machine))
        self._stages_of = lru_cache(maxsize=None)(self._balanced_stages)
        self._states_of = lru_cache(maxsize=None)(self._states_of_spans)
        self._gathered_bytes = lru_cache(maxsize=None)(self._gathered_bytes_of_layers)

    def estimate(self, layout: Layout) -> tuple[float, float]:
        """A step's seconds and its largest rank's bytes. Raises ValueError as `predict`.

        Idle times assume equal stages.
        """
        stages = self._stages(layout)
        states = self.states(layout)
        count = self.micro_batches(layout)
        of_stages = [stage.seconds for stage in stages]
        longest = max(of_stages)
        mean = sum(of_stages) / len(of_stages)
        equal = self._equal_stages(layout, stages, mean)
        waits, gathered = self._gathers(layout, stages)
        # The pipeline fills and drains at the mean stage's pace; in between the longest stage decides.
        seconds = waits + max(count * longest, (count - 1) * longest + (1 + equal.idle) * mean)
        exposed, sharing = self._gradients(layout, states, stages[0].backward)
        seconds += exposed
        seconds += self.agreement(layout)
        seconds += self._update(states)
        seconds += sharing
        splits = SCHEDULES[layout.schedule].looks_at_costs
        need = 0.0
        for rank, (stage, of_rank) in enumerate(zip(stages, states, strict=True)):
            stashed = stage.stashed
            if splits:
                # About half of the micro-batches under way wait for their weight gradients.
                stashed = max(stashed, (stashed + stage.deferred) // 2)
            # Gradients are exchanged after the last backward, when no activation is left.
            peak = max(equal.stashed[rank] * stashed + stage.working + stage.messages, of_rank.exchanged)
            if layout.has_graphs:
                # A pool keeps all tensors of its graphs, for each micro-batch under way.
                pools = equal.under_way[rank] * (stage.stashed + stage.deferred)
                peak = max(peak, pools + stage.messages)
            need = max(need, of_rank.resident + self.samples(layout, rank) + gathered + peak)
        return seconds, self.with_program(need)

    def least_seconds(self, layout: Layout) -> float:
        """A bound on a step's seconds with any schedule of the layout's grid: all of its computations."""
        stages = self._stages(layout)
        computed = sum(stage.seconds for stage in stages) / len(stages)
        return self.micro_batches(layout) * computed + self.agreement(layout)

    def predict(self, layout: Layout) -> Predicted:
        """Simulates one replica's step.

        Raises:
            ValueError: an impossible size, or a schedule that cannot place the layers.
        """
        costs = self.costs(layout)
        bounds = self.bounds(layout)
        count = self.micro_batches(layout)
        choice = self._schedule_choice(layout, bounds, costs, count)
        schedule = choice.training(count)
        executed = choice.segment_bounds(bounds)
        of_segments = costs.of_chunks(executed, choice.segment_placement)
        if choice.weights is not None:
            # Weights travel between replicas, not between stages.
            of_replicas = replace(costs, link=self._cluster.link(layout.grid, "dp_shard"))
            of_segments = of_replicas.with_unshards(of_segments, choice.weights.segment_bytes, layout.grid.dp_shard)
        result = simulate(schedule, of_segments)
        states = self.states(layout)
        exposed, sharing = self._gradients(layout, states, self._stages(layout)[0].backward)
        time = StepTime(
            pipeline=result.makespan,
            reduction=exposed,
            agreement=self.agreement(layout),
            update=self._update(states),
            sharing=sharing,
        )
        exchanged = [each.exchanged for each in states]
        peaks = peak_moments(schedule, executed, costs, exchanged, layout.has_graphs)
        memory = []
        for rank, (of_rank, peak) in enumerate(zip(states, peaks, strict=True)):
            program = self._cluster.machine.program
            samples = self.samples(layout, rank)
            memory.append(forecast(of_rank, peak, schedule, rank, choice.weights, program=program, samples=samples))
        return Predicted(time, tuple(memory), bounds, result.idle_share, count)

    def costs(self, layout: Layout) -> PipelineCosts:
        """A rank's costs by layer, and the stages' link. Raises ValueError for an impossible size."""
        return PipelineCosts(self._layer_costs(layout), self._cluster.link(layout.grid, "pp"))

    def bounds(self, layout: Layout, placement: Placement | None = None) -> tuple[range, ...]:
        """Layers by chunk, balanced by seconds."""
        return bounds_by_seconds(self._layer_costs(layout), placement or layout.placement)

    def states(self, layout: Layout) -> list[PlannedStates]:
        """By pipeline rank."""
        grid = layout.grid
        owners = layout.copies if layout.shards_optimizer else 1
        return [self._states_of(stage.spans, grid.tp, grid.dp_shard, owners) for stage in self._stages(layout)]

    def samples(self, layout: Layout, rank: int) -> int:
        """Input samples' bytes. Only the first stage reads them."""
        if rank != layout.placement[0]:
            return 0
        itemsize = ITEM_SIZES[PRECISIONS[self._config.training.precision].weights]
        # Samples mix with partners of the whole micro-batch, also where ranks share it.
        samples = layout.micro_batch_size if self._config.data.mixes else layout.own_samples
        return sample_bytes(self._config, itemsize, self.micro_batches(layout), samples, not self._on_gpu)

    def micro_batches(self, layout: Layout) -> int:
        """Largest number on a replica."""
        return self._counts(layout).most

    def _counts(self, layout: Layout) -> MicroBatchCounts:
        batch = self._config.training.global_batch_size
        return micro_batch_counts(batch, layout.micro_batch_size, layout.grid.replicas)

    def agreement(self, layout: Layout) -> float:
        """Seconds for the step's all-reduce of a few numbers over all ranks."""
        machine = self._cluster.machine
        # Every rank takes part, so that one node boundary is enough to slow it.
        link = machine.within if layout.ranks <= self._cluster.ranks_of_node else machine.between
        return link.all_reduce(layout.ranks, 0, self._on_gpu)

    def without_samples(self, layout: Layout) -> float:
        """The largest rank's bytes that do not grow with the micro-batch size."""
        return self.with_program(max(states.resident for states in self.states(layout)))

    def with_program(self, tensors: float) -> float:
        """A rank's bytes: tensors, their unused blocks, and the program."""
        machine = self._cluster.machine
        return machine.program + tensors * (1 + machine.rest)

    def _update(self, states: Sequence[PlannedStates]) -> float:
        return max(each.updated for each in states) * self._cluster.machine.update

    def _share(self, layout: Layout) -> tuple[LayerShare, LinkCost]:
        """A rank's share, and the slowest link between ranks that share a layer."""
        grid = layout.grid
        # The seconds of a layer depend on how many ranks of the node compute at the same time.
        busy = min(layout.ranks, self._cluster.ranks_of_node)
        share = LayerShare(grid.tp, grid.cp, layout.cut, layout.own_samples, busy)
        # Tensor parallel ranks are neighbours, context parallel ones further apart.
        return share, self._cluster.link(grid, "cp")

    def _layer_costs(self, layout: Layout) -> tuple[LayerCost, ...]:
        return self._layers(*self._share(layout), layout.has_graphs)

    def _stages(self, layout: Layout) -> list[Stage]:
        return self._stages_of(*self._share(layout), layout.has_graphs, layout.placement, layout.recompute != NEVER)

    def _balanced_stages(
        self, share: LayerShare, link: LinkCost, has_graphs: bool, placement: Placement, recomputes: bool
    ) -> list[Stage]:
        return balanced_stages(self._layers(share, link, has_graphs), placement, recomputes)

    def _equal_stages(self, layout: Layout, stages: Sequence[Stage], mean: float) -> EqualStages:
        """`equal_stages` for a layout. `mean` is a stage's seconds."""
        count = self.micro_batches(layout)
        message = 0.0
        if len(stages) > 1:
            boundaries = max(1, len(layout.placement) - 1)
            # Two ranks count each boundary, each with a message in both directions.
            size = sum(each.messages for each in stages) / (4 * boundaries)
            message = self._cluster.link(layout.grid, "pp").message(size)
        relative = 0.0
        if message >= mean / 64:
            # Rounded to powers of the square root of two, so that layouts share simulations.
            relative = 2 ** (round(2 * math.log2(message / mean)) / 2)
        # More micro-batches than two a stage change neither idle time nor stashes, but for GPipe's.
        simulated = min(count, 2 * len(stages))
        recomputes = layout.recompute != NEVER
        found = equal_stages(layout.schedule, len(stages), simulated, layout.chunks, recomputes, relative)
        if layout.schedule == "gpipe":
            all_of_them = (float(count),) * len(stages)
            return EqualStages(found.idle, all_of_them, all_of_them)
        return found

    def _gathers(self, layout: Layout, stages: Sequence[Stage]) -> tuple[float, int]:
        """Seconds a rank waits for sharded weights, and peak bytes while they are gathered."""
        ranks = layout.grid.dp_shard
        if ranks == 1:
            return 0.0, 0
        link = self._cluster.link(layout.grid, "dp_shard")
        of_layers = self._gathered_bytes(layout.grid.tp)
        count = self.micro_batches(layout)
        longest = 0.0
        most = 0
        for stage in stages:
            sizes = [of_layers[i] for i in chain(*stage.spans) if of_layers[i]]
            seconds = sum(link.exchange(ranks, size / ranks) for size in sizes)
            # The two segments that a pass used last are still gathered when the next pass begins with them.
            largest = sum(sorted(sizes)[-AT_ONCE:])
            again = max(0, 1 - AT_ONCE / max(1, len(sizes)))
            resident = largest
            if not self._config.parallel.reshard_after_forward:
                again = 0.0
                resident = sum(sizes)
            forward = seconds * (1 + (count - 1) * again) - count * (stage.seconds - stage.backward)
            backward = seconds * count * again - count * stage.backward
            longest = max(longest, max(0.0, forward) + max(0.0, backward))
            # Buffers of gathers in flight are at most as large as their weights.
            most = max(most, resident + largest)
        return longest, most

    def _gathered_bytes_of_layers(self, tensor: int) -> list[int]:
        return [gathered_bytes(tensors) for tensors in self._resident(tensor)]

    def _states_of_spans(self, spans: tuple[range, ...], tensor: int, weight: int, owners: int) -> PlannedStates:
        layers = self._resident(tensor)
        chunks = [list(chain(*layers[span.start : span.stop])) for span in spans]
        return states_of(chunks, weight, owners, self._config.optimizer, self._on_gpu)

    def _gradients(self, layout: Layout, states: Sequence[PlannedStates], backward: float) -> tuple[float, float]:
        """Seconds for reduction after the last backward, and for the all-gather of updated shards."""
        copies = layout.copies
        weight = layout.grid.dp_shard
        link = self._cluster.link(layout.grid, "dp_replicate")
        reduced = max(each.reduced for each in states)
        updated = max(each.updated for each in states)
        bucket = GPU_BUCKET_BYTES if self._on_gpu else CPU_BUCKET_BYTES
        buckets = max(1, -(-reduced // bucket))
        over_copies = 0.0
        sharing = 0.0
        if copies > 1 and layout.shards_optimizer:
            over_copies = link.exchange(copies, updated / buckets)
            sharing = link.exchange(copies, updated)
        elif copies > 1:
            over_copies = link.all_reduce(copies, reduced / buckets, self._on_gpu)
        # Equal buckets are reduced during the last micro-batch's backward, the last one after it. Ranks with the same
        # shards sum them at the end.
        during = over_copies
        after = 0.0
        if weight > 1:
            during = self._cluster.link(layout.grid, "dp_shard").exchange(weight, reduced / buckets)
            after = buckets * over_copies
        return max(during, buckets * during - backward) + after, sharing

    def _schedule_choice(
        self, layout: Layout, bounds: tuple[range, ...], costs: PipelineCosts, count: int
    ) -> ScheduleChoice:
        def costs_of(placement: Placement) -> Sequence[ChunkCost]:
            return costs.of_chunks(self.bounds(layout, placement), placement, layout.recompute != NEVER)

        choice = plan_schedule(layout.schedule, layout.grid.pp, layout.chunks, count, costs_of)
        is_sharded = layout.grid.dp_shard > 1
        # Sharded replicas must gather in the same order, whatever their numbers of micro-batches.
        counts = self._counts(layout).distinct if is_sharded else (count,)
        choice = replace(choice, decided=tuple(map(choice.of_chunks, counts)))
        if layout.recompute != NEVER or is_sharded:
            choice = choice.in_segments(bounds, layout.recompute)
        if is_sharded:
            of_layers = self._gathered_bytes(layout.grid.tp)
            sizes = [sum(of_layers[span.start : span.stop]) for span in choice.segment_bounds(bounds)]
            reshards = self._config.parallel.reshard_after_forward
            weights = SharedWeights(tuple(sizes), ranks=layout.grid.dp_shard, reshard_after_forward=reshards)
            choice = choice.sharing(weights, counts)
        return choice
