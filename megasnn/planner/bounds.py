"""Closed bounds: what a step on a layout takes at least, for a hundred thousand layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import chain

from megasnn.config import PretrainConfig
from megasnn.grid import ContextCut, Grid
from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts
from megasnn.pipeline.peak_memory import unit_memory
from megasnn.planner.candidates import Layout
from megasnn.planner.cost_file import Analysis, HeldTensor
from megasnn.planner.costs import Links, Share, held_tensors, layer_costs
from megasnn.planner.machines import Cluster
from megasnn.planner.memory import States, sample_bytes, states_of
from megasnn.precisions import PRECISIONS
from megasnn.schedule import ChunkCost, Kind, Schedule
from megasnn.schedule.named import RECIPES, SCHEDULES
from megasnn.schedule.partition import placed_bounds
from megasnn.schedule.passes import NEVER

ITEM_SIZES = {"float32": 4, "float64": 8, "bfloat16": 2}
Placement = tuple[int, ...]


@dataclass(frozen=True)
class Sums:
    """Seconds in which a rank's gradients and rows travel.

    Attributes:
        to_keepers: until those who keep rows have them. over_copies: of the sum over ranks that hold the same.
        sharing: owners of rows give them to the others, behind the optimizer's step.
    """

    to_keepers: float
    over_copies: float
    sharing: float


@dataclass(frozen=True)
class Chunks:
    """Bounds of each chunk.

    Attributes:
        costs: for the simulator.
        kept: bytes that it keeps of a micro-batch; of_backward: that it needs in the backward of one at least, with
            what it keeps of that. Both where nothing is recomputed (False), and where all forwards are.
        again: seconds of forwards that are recomputed.
    """

    costs: tuple[ChunkCost, ...]
    kept: dict[bool, tuple[int, ...]]
    of_backward: dict[bool, tuple[int, ...]]
    again: tuple[float, ...]


class SizedLayers:
    """Layers at one size of tensor and context parallelism, and their chunks on any placement. costs: of each layer."""

    def __init__(self, costs: tuple[LayerCost, ...]) -> None:
        self.costs = costs
        self._seconds = tuple(layer.seconds for layer in costs)
        self._chunks: dict[tuple[LinkCost, Placement], Chunks] = {}
        units = unit_memory(PipelineCosts(costs, LinkCost()), [range(i, i + 1) for i in range(len(costs))])
        self._kept = {False: [each.held for each in units], True: [each.entering for each in units]}
        # A schedule may do a backward in one go or in two.
        self._working = [min(each.working[Kind.BACKWARD], each.working[Kind.INPUT_GRADIENT]) for each in units]

    def bounds(self, placement: Placement) -> tuple[range, ...]:
        """Layers of each chunk, balanced by their seconds."""
        return _balanced(self._seconds, placement)

    def chunks(self, link: LinkCost, placement: Placement) -> Chunks:
        """Args: link: between two stages."""
        if (link, placement) not in self._chunks:
            bounds, layers = self.bounds(placement), self.costs
            self._chunks[link, placement] = Chunks(
                costs=tuple(PipelineCosts(layers, link).of_chunks(bounds, placement)),
                kept={
                    which: tuple(sum(kept[i] for i in span) for span in bounds) for which, kept in self._kept.items()
                },
                of_backward={which: tuple(self._of_backward(span, which) for span in bounds) for which in self._kept},
                # The last layer of a chunk goes backward right behind its forward.
                again=tuple(sum(layers[i].forward for i in span[:-1]) for span in bounds),
            )
        return self._chunks[link, placement]

    def _of_backward(self, span: range, recomputes: bool) -> int:
        """Each layer's, with all that it has kept, while those before it keep theirs, and those behind it are done."""
        most = before = 0
        for i in span:
            most = max(most, before + self.costs[i].held + self._working[i])
            before += self._kept[recomputes][i]
        return most


@lru_cache(maxsize=4096)
def _balanced(seconds: tuple[float, ...], placement: Placement) -> tuple[range, ...]:
    return tuple(placed_bounds(seconds, placement))


class Bounds:
    """Lower bounds of a model's step on a cluster, layout by layout, with the micro-batches of a configuration.

    Args:
        other: the same with micro-batches of another size: ranks hold the same weights, gradients and optimizer state.
    """

    def __init__(
        self, analysis: Analysis, config: PretrainConfig, cluster: Cluster, other: Bounds | None = None
    ) -> None:
        self._analysis, self._config, self._cluster = analysis, config, cluster
        self._on_gpu = cluster.machine.kind == "cuda"
        self._held = lru_cache(maxsize=None)(partial(held_tensors, analysis))
        self._sized_on = lru_cache(maxsize=None)(self._sized_of)
        self._layers = lru_cache(maxsize=None)(self._layers_of)
        self._states: Callable[..., States] = other._states if other else lru_cache(maxsize=None)(self._states_of)
        self._states_on = lru_cache(maxsize=None)(self._states_of_ranks)

    def costs(self, layout: Layout) -> PipelineCosts:
        """Costs of all layers on a rank, and of its links. Raises ValueError for a size that cannot be."""
        costs = self._sized_on(layout.grid, layout.cut).costs
        return PipelineCosts(costs, self._cluster.link(layout.grid, "pp"))

    def bounds(self, layout: Layout, placement: Placement | None = None) -> tuple[range, ...]:
        """Layers of each chunk, balanced by cost."""
        return self._sized_on(layout.grid, layout.cut).bounds(placement or layout.placement)

    def least(self, layout: Layout) -> tuple[float, float]:
        """Seconds and bytes that a step takes at least: a rank's work and the bubble before it, and a micro-batch's way
        through all chunks and back; states, and what the schedule keeps when the first backward begins, in the order
        that needs least."""
        chunks = self._sized_on(layout.grid, layout.cut).chunks(self._cluster.link(layout.grid, "pp"), layout.placement)
        recomputes, split = layout.recompute != NEVER, SCHEDULES[layout.schedule].looks_at_costs
        stages, count = layout.grid.pp, self.micro_batches(layout)
        held = held_before_backwards(layout.schedule, stages, count, layout.chunks)
        kept, of_backward = chunks.kept[recomputes], chunks.of_backward[recomputes]
        work, stash, last = [0.0] * stages, [0.0] * stages, [0] * stages
        ahead, before, way = [math.inf] * stages, 0.0, 0.0
        for chunk, rank in enumerate(layout.placement):
            cost = chunks.costs[chunk]
            again = chunks.again[chunk] if recomputes else 0.0
            work[rank] += cost.forward + cost.backward + again
            stash[rank] += held[chunk] * kept[chunk]
            last[rank] = chunk
            ahead[rank] = min(ahead[rank], before)
            before += cost.forward + (0.0 if split else cost.backward)
            way += cost.forward + (cost.input_gradient if split else cost.backward)
        busy = max(way, *(start + count * each for start, each in zip(ahead, work, strict=True)))
        states = self.states(layout)
        reduced, updated = max(each.reduced for each in states), max(each.updated for each in states)
        sums = self.sums(layout, reduced, updated)
        hidden = max(0.0, sums.to_keepers + sums.over_copies - busy)
        seconds = busy + hidden + self.agreement(layout) + updated * self._cluster.machine.update + sums.sharing
        need = 0.0
        for rank, (of_rank, chunk) in enumerate(zip(states, last, strict=True)):
            moment = max(stash[rank] - kept[chunk] + of_backward[chunk], of_rank.exchanged)
            need = max(need, _held(of_rank) + self.samples(layout, rank) + moment)
        return seconds, self.with_program(need)

    def sums(self, layout: Layout, kept: int, owned: int) -> Sums:
        """Sums of a rank's gradients in one go. Args: bytes of the rows that it keeps, and of those that it owns."""
        copies, over_copies, sharing = layout.copies, 0.0, 0.0
        link, keepers = (self._cluster.link(layout.grid, axis) for axis in ("dp_replicate", "dp_shard"))
        if layout.shards_optimizer and copies > 1:
            over_copies = sharing = link.exchange(copies, owned)
        elif copies > 1:
            over_copies = link.all_reduce(copies, kept, self._on_gpu)
        weight = layout.grid.dp_shard
        return Sums(keepers.exchange(weight, kept) if weight > 1 else 0.0, over_copies, sharing)

    def agreement(self, layout: Layout) -> float:
        """Seconds of what a step reads, which is a sum over all ranks of a few numbers."""
        machine = self._cluster.machine
        link = machine.within if layout.ranks <= self._cluster.ranks_of_node else machine.between
        return link.all_reduce(layout.ranks, 0, self._on_gpu)

    def without_samples(self, layout: Layout) -> float:
        """Bytes of the largest rank that do not depend on the size of micro-batches."""
        return self.with_program(max(map(_held, self.states(layout))))

    def with_program(self, tensors: float) -> float:
        """Bytes of a rank whose tensors take so many."""
        machine = self._cluster.machine
        return machine.program + tensors * (1 + machine.rest)

    def states(self, layout: Layout) -> tuple[States, ...]:
        """States of each pipeline rank. Schedules that place chunks alike have the same, with recompute or not."""
        return self._states_on(layout.grid, layout.cut, layout.placement, layout.shards_optimizer)

    def micro_batches(self, layout: Layout) -> int:
        """Micro-batches of the replica that has the most."""
        return layout.micro_batches(self._config.training.micro_batches)

    def samples(self, layout: Layout, rank: int) -> int:
        """Bytes of images, which the first stage has."""
        if rank != layout.placement[0]:
            return 0
        config = self._config
        itemsize = ITEM_SIZES[PRECISIONS[config.training.precision].weights]
        share = layout.own_samples(config.training.micro_batch_size)
        return sample_bytes(config, itemsize, self.micro_batches(layout), share, not self._on_gpu)

    def tensors(self, layout: Layout) -> Sequence[Sequence[HeldTensor]]:
        """Tensors of each layer."""
        return self._held(layout.grid.tp)

    def _sized_of(self, grid: Grid, cut: ContextCut) -> SizedLayers:
        cluster, layout = self._cluster, Layout(grid, cut)
        links = Links(cluster.link(grid, "tp"), cluster.link(grid, "cp"))
        samples = layout.own_samples(self._config.training.micro_batch_size)
        at_work = min(layout.ranks, cluster.ranks_of_node)
        return self._layers(Share(grid.tp, grid.cp, cut, samples, at_work), links)

    def _layers_of(self, share: Share, links: Links) -> SizedLayers:
        return SizedLayers(layer_costs(self._analysis, self._cluster.machine, share, links))

    def _states_of_ranks(self, grid: Grid, cut: ContextCut, placement: Placement, shards: bool) -> tuple[States, ...]:
        spans: list[list[range]] = [[] for _ in range(grid.pp)]
        for rank, span in zip(placement, self._sized_on(grid, cut).bounds(placement), strict=True):
            spans[rank].append(span)
        # Owners differ by their number alone, and without owners replicas do not change what a rank holds.
        owners = grid.dp_replicate * grid.cp if shards else 1
        alike = Layout(Grid(dp_replicate=owners, tp=grid.tp, dp_shard=grid.dp_shard), shards_optimizer=shards)
        return tuple(self._states(alike, tuple(each)) for each in spans)

    def _states_of(self, layout: Layout, spans: tuple[range, ...]) -> States:
        tensors = self.tensors(layout)
        chunks = [list(chain(*(tensors[i] for i in span))) for span in spans]
        return states_of(chunks, layout, self._config.optimizer, self._on_gpu)


def _held(states: States) -> int:
    return states.weights + states.gradients + states.optimizer


@cache
def held_before_backwards(name: str, stages: int, micro_batches: int, chunks: int) -> tuple[int, ...]:
    """Micro-batches that each chunk holds at least when the first backward of its rank begins, which is one through the
    last chunk of the rank. Args: chunks: on each rank."""
    placement = SCHEDULES[name].placement(stages, chunks)
    # Further micro-batches begin where those before them go backward: a rank holds no more of them.
    count = micro_batches if name == "gpipe" else min(micro_batches, 2 * stages)
    found = [count] * len(placement)
    if name == "gpipe":
        return tuple(found)
    for order in _orders(name, stages, count, chunks):
        for rank, row in enumerate(order.actions):
            held = dict.fromkeys([chunk for chunk, place in enumerate(placement) if place == rank], 0)
            for chunk, kind, _ in row:
                if kind is not Kind.FORWARD:
                    break
                held[chunk] += 1
            for chunk, number in held.items():
                found[chunk] = min(found[chunk], number)
    return tuple(found)


def _orders(name: str, stages: int, micro_batches: int, chunks: int) -> Iterator[Schedule]:
    """Forwards and first parts of backwards of each rank, in each order that a named schedule may take."""
    of_named = SCHEDULES[name].order
    if of_named is None:
        yield from RECIPES[name](stages).orders(micro_batches)
    else:
        yield of_named(stages, micro_batches, chunks)
