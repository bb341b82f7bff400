"""Executable schedules for any number of micro-batches, from a schedule's name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

from megasnn.common.files import quantity
from megasnn.schedule.actions import Schedule
from megasnn.schedule.costs import ChunkCost
from megasnn.schedule.generators import forward_only
from megasnn.schedule.named import AUTO_SCHEDULE, SCHEDULES, CostsOf, equal_costs, find_best, named_schedule
from megasnn.schedule.passes import (
    NEVER,
    RECOMPUTE,
    SharedWeights,
    complete,
    insert_recompute,
    insert_transfers,
    refine,
)
from megasnn.schedule.validate import validate_schedule

FLAG = "--num-virtual-stages-per-pipeline-rank"


@dataclass(frozen=True)
class ScheduleChoice:
    """A run's schedule, for any number of micro-batches per step.

    Attributes:
        name: "auto" searches the best schedule on this placement for each number of micro-batches.
        placement: each chunk's pipeline rank.
        costs: per chunk; None: equal costs.
        decided: chunk schedules found earlier; ranks do not search again.
        segments_per_chunk: None: chunks stay whole.
        recompute: name in `RECOMPUTE`.
        chosen: segments whose forwards are always recomputed.
        weights: None: every rank holds its weights whole.
    """

    name: str
    placement: tuple[int, ...]
    costs: tuple[ChunkCost, ...] | None = None
    decided: tuple[Schedule, ...] = ()
    segments_per_chunk: tuple[int, ...] | None = None
    recompute: str = NEVER
    chosen: frozenset[int] = frozenset()
    weights: SharedWeights | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Fields alone: other ranks rebuild the cached schedules.
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def in_segments(self, bounds: Sequence[range], recompute: str) -> ScheduleChoice:
        """Executed layer by layer; `bounds` has each chunk's layers."""
        # A chunk without layers is one segment: it passes on its input.
        counts = tuple(max(1, len(layers)) for layers in bounds)
        return replace(self, segments_per_chunk=counts, recompute=recompute)

    def sharing(self, weights: SharedWeights, micro_batches: Collection[int]) -> ScheduleChoice:
        """With sharded weights, in training and evaluation.

        Raises ValueError unless all replicas have the same number of micro-batches per step.
        """
        counts = sorted(set(micro_batches))
        if len(counts) > 1:
            raise ValueError(
                f"--weight-parallel-size: replicas have {' and '.join(map(str, counts))} micro-batches in one step, "
                "and would not gather weights in the same order; let them have equally many (--global-batch-size)"
            )
        return replace(self, weights=weights)

    @property
    def stages(self) -> int:
        return max(self.placement) + 1

    @property
    def segment_counts(self) -> tuple[int, ...]:
        return self.segments_per_chunk or (1,) * len(self.placement)

    @property
    def segment_placement(self) -> tuple[int, ...]:
        placement: list[int] = []
        for rank, count in zip(self.placement, self.segment_counts, strict=True):
            placement += [rank] * count
        return tuple(placement)

    def segment_bounds(self, bounds: Sequence[range]) -> list[range]:
        """Each segment's layers, from each chunk's: one each, and the rest in the last segment."""
        segments = []
        for layers, count in zip(bounds, self.segment_counts, strict=True):
            last = layers.start + count - 1
            segments += [range(layer, layer + 1) for layer in range(layers.start, last)]
            segments.append(range(last, layers.stop))
        return segments

    @cached_property
    def training(self) -> Callable[[int], Schedule]:
        """(micro-batches) -> validated schedule. Cached: large schedules take seconds to build."""
        # A cache on the method itself would be shared, and keep every choice alive.
        return cache(self._training)

    @cached_property
    def evaluation(self) -> Callable[[int], Schedule]:
        """(micro-batches) -> validated schedule without backwards. Cached."""
        return cache(self._evaluation)

    def of_chunks(self, micro_batches: int) -> Schedule:
        """Before chunks are split."""
        for schedule in self.decided:
            if schedule.micro_batches == micro_batches:
                return schedule
        stages = self.stages
        chunks_per_rank = len(self.placement) // stages
        if self.name == AUTO_SCHEDULE:
            return find_best(stages, micro_batches, self._costs_of, chunks_per_rank, self.placement)
        order = named_schedule(self.name, stages, micro_batches, chunks_per_rank, self._costs_of)
        schedule = complete(order)
        validate_schedule(schedule)
        return schedule

    def _training(self, micro_batches: int) -> Schedule:
        schedule = self.of_chunks(micro_batches)
        if self.segments_per_chunk is None:
            return schedule if self.weights is None else self._with_weights(schedule)
        by_name = RECOMPUTE[self.recompute]

        def wanted(segment: int, micro_batch: int) -> bool:
            return segment in self.chosen or by_name(micro_batch, micro_batches)

        schedule = refine(schedule, self.segments_per_chunk)
        return self._with_weights(insert_recompute(schedule, wanted))

    def _evaluation(self, micro_batches: int) -> Schedule:
        order = forward_only(self.segment_placement, micro_batches)
        return self._with_weights(insert_transfers(order))

    def _with_weights(self, schedule: Schedule) -> Schedule:
        if self.weights is not None:
            schedule = self.weights.insert(schedule)
        validate_schedule(schedule)
        return schedule

    def _costs_of(self, placement: tuple[int, ...]) -> Sequence[ChunkCost]:
        if self.costs is None or placement != self.placement:
            return equal_costs(self.stages)(placement)
        return self.costs


def plan_schedule(
    name: str,
    stages: int,
    chunks_per_rank: int | None = None,
    micro_batches: int = 1,
    costs_of: CostsOf | None = None,
) -> ScheduleChoice:
    """Chooses a schedule and its placement.

    Args:
        name: in `SCHEDULES`, or "auto".
        micro_batches: number in a usual step; "auto" chooses the placement for it.
        costs_of: None: equal costs.
    Raises:
        ValueError: an unknown name, a size below 1, or an impossible number of chunks.
    """
    for flag, value in (("--pipeline-model-parallel-size", stages), ("number of micro-batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    chunks_per_rank = chunks_of_schedule(name, chunks_per_rank)
    if costs_of is None:
        costs_of = equal_costs(stages)
    if name == AUTO_SCHEDULE and stages == 1 and chunks_per_rank == 1:
        # A single chunk never waits, so every schedule takes as long, and 1F1B holds the fewest activations.
        name = "1f1b"
    decided: tuple[Schedule, ...] = ()
    if name != AUTO_SCHEDULE:
        placement = SCHEDULES[name].placement(stages, chunks_per_rank or 1)
    else:
        best = find_best(stages, micro_batches, costs_of, chunks_per_rank)
        decided = (best,)
        placement = best.placement
    return ScheduleChoice(name, placement, tuple(costs_of(placement)), decided)


def generate(
    name: str,
    stages: int,
    micro_batches: int,
    chunks_per_rank: int | None = None,
    costs_of: CostsOf | None = None,
) -> Schedule:
    """Validated, with transfers and gradient reduction. Arguments as for `plan_schedule`."""
    return plan_schedule(name, stages, chunks_per_rank, micro_batches, costs_of).training(micro_batches)


def chunks_of_schedule(name: str, asked: int | None = None) -> int | None:
    """The number asked for, else the schedule's own; None lets "auto" choose.

    Raises ValueError for an unknown name or an impossible number.
    """
    named = None if name == AUTO_SCHEDULE else SCHEDULES[name]
    if asked is not None and asked < 1:
        raise ValueError(f"{FLAG} must be at least 1, got {asked}")
    if named is None:
        return asked
    if asked is None or asked == named.chunks:
        return named.chunks
    if named.any_chunks and asked > named.chunks:
        return asked
    needs = f"needs {named.chunks} or more" if named.any_chunks else f"computes {quantity(named.chunks, 'chunk')}"
    raise ValueError(f"{FLAG} {asked}: --pipeline-schedule {name} {needs} per pipeline rank; leave the flag out")
