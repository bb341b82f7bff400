"""What ranks of a layout have, and what a step takes at least: closed bounds, for many layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from operator import mul

from megasnn.config import PretrainConfig
from megasnn.grid import ContextCut, Grid
from megasnn.pipeline.cost_model import PipelineCosts
from megasnn.planner.analysis import Analysis, HeldTensor
from megasnn.planner.cluster import Cluster
from megasnn.planner.costs import Links, Share, layer_costs
from megasnn.planner.held import Held, held_at_backwards, held_before_backwards
from megasnn.planner.layout import Layout
from megasnn.planner.memory import sample_bytes
from megasnn.planner.reduction import Sums
from megasnn.planner.sized import SizedLayers
from megasnn.planner.states import States, states_of
from megasnn.precisions import PRECISIONS
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.passes import NEVER

ITEM_SIZES = {"float32": 4, "float64": 8, "bfloat16": 2}


class Bounds:
    """What a model's step takes at least on a cluster, layout by layout."""

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

    def least(self, layout: Layout) -> tuple[float, float]:
        """Seconds and bytes that a step takes at least: a rank's work and the bubble before it; states, and what the
        schedule keeps when the first backward begins, in the order that needs least."""
        chunks = self._sized(layout).chunks(self._cluster.link(layout, "pipeline"), layout.placement)
        recomputes = layout.recompute != NEVER
        count = layout.micro_batches(self._config.training.micro_batches)
        split = SCHEDULES[layout.schedule].looks_at_costs
        stages = layout.grid.pipeline
        held = held_before_backwards(layout.schedule, stages, count, layout.chunks)
        kept, of_backward = chunks.kept[recomputes], chunks.of_backward[recomputes]
        work, stash, last = [0.0] * stages, [0.0] * stages, [0] * stages
        ahead = [math.inf] * stages
        before = 0.0
        for chunk, rank in enumerate(layout.placement):
            cost = chunks.costs[chunk]
            again = chunks.again[chunk] if recomputes else 0.0
            work[rank] += cost.forward + (cost.split_backward if split else cost.backward) + again
            stash[rank] += held[chunk] * kept[chunk]
            last[rank] = chunk
            ahead[rank] = min(ahead[rank], before)
            before += cost.forward + (0.0 if split else cost.backward)
        busy = max(start + count * each for start, each in zip(ahead, work, strict=True))
        states = self.states(layout)
        reduced, updated = max(each.reduced for each in states), max(each.updated for each in states)
        summed = self._sums.at_once(layout, reduced, updated)
        time = busy * self._cluster.slowest(layout.ranks) + updated * self._cluster.machine.update
        time += max(0.0, summed.to_keepers + summed.over_copies - busy) + self._sums.agreement(layout) + summed.sharing
        return time, self._need(layout, [x - kept[i] + of_backward[i] for x, i in zip(stash, last, strict=True)])

    def least_bytes(self, layout: Layout) -> float:
        """As `least`, and closer: over all backwards of the schedule."""
        count, stages = layout.micro_batches(self._config.training.micro_batches), layout.grid.pipeline
        orders = held_at_backwards(layout.schedule, stages, count, layout.chunks)
        return min(self._need(layout, self._at_backwards(layout, of_ranks)) for of_ranks in orders)

    def _at_backwards(self, layout: Layout, of_ranks: Sequence[Sequence[Held]]) -> Iterator[float]:
        """Bytes of what each rank keeps, and of the backward under way, at most."""
        chunks = self._sized(layout).chunks(self._cluster.link(layout, "pipeline"), layout.placement)
        kept, of_backward = (each[layout.recompute != NEVER] for each in (chunks.kept, chunks.of_backward))
        for rank, cases in enumerate(of_ranks):
            mine = [kept[chunk] for chunk in layout.chunks_of(rank)]
            yield max(sum(map(mul, mine, held)) - kept[chunk] + of_backward[chunk] for chunk, held in cases)

    def _need(self, layout: Layout, at_backwards: Iterable[float]) -> float:
        """Bytes of the rank that needs most."""
        need = 0.0
        for rank, (states, backward) in enumerate(zip(self.states(layout), at_backwards, strict=True)):
            tensors = states.weights + states.gradients + states.optimizer + self._samples(layout, rank)
            need = max(need, tensors + max(backward, states.exchanged))
        return self.with_program(need)

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
