"""Schedules that an executor runs, for any number of micro-batches, from a schedule's name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

from megasnn.schedule.actions import Schedule
from megasnn.schedule.costs import ChunkCost
from megasnn.schedule.generators import forward_only
from megasnn.schedule.named import AUTO_SCHEDULE, SCHEDULES, CostsOf, equal_costs, find_best, named_schedule
from megasnn.schedule.partition import loop_placement
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
    """Way of a run's micro-batches through its pipeline, however many of them a step has.

    Attributes:
        name: of the schedule; "auto" is the best one on this placement, searched for each number of micro-batches.
        placement: pipeline rank of each chunk.
        costs: of each chunk; equal ones when not given.
        decided: schedules that were settled on before, where ranks must not search for themselves; of chunks.
        segments_per_chunk: number of segments in which each chunk is executed; None: the chunks as they are.
        recompute: a name in `RECOMPUTE`: which forwards of segments are computed again.
        chosen: segments whose forwards are always computed again.
        weights: of segments, where ranks shard them by rows; None: every rank has its own whole.
    """

    name: str
    placement: tuple[int, ...]
    costs: tuple[ChunkCost, ...] | None = None
    decided: tuple[Schedule, ...] = ()
    segments_per_chunk: tuple[int, ...] | None = None
    recompute: str = NEVER
    chosen: frozenset[int] = frozenset()
    weights: SharedWeights | None = None

    def in_segments(self, bounds: Sequence[range], recompute: str) -> ScheduleChoice:
        """Plan of the same schedule, executed layer by layer.

        Args:
            bounds: layers of each chunk. recompute: as the attribute.
        """
        return replace(self, segments_per_chunk=tuple(max(1, len(span)) for span in bounds), recompute=recompute)

    def sharing(self, weights: SharedWeights, micro_batches: Collection[int]) -> ScheduleChoice:
        """Plan of the same schedule with weights that are gathered where they are used, in training and evaluation.

        Args:
            weights: of the segments that are executed.
            micro_batches: numbers of them that the replicas have in a step.
        Raises:
            ValueError: replicas that would not gather in the same order.
        """
        counts = sorted(set(micro_batches))
        if len(counts) > 1:
            raise ValueError(
                f"--weight-parallel-size: replicas have {' and '.join(map(str, counts))} micro-batches in one step, "
                "and would not gather weights in the same order; let them have equally many (--global-batch-size)"
            )
        return replace(self, weights=weights)

    @property
    def segment_counts(self) -> tuple[int, ...]:
        """Number of segments in which each chunk is executed."""
        return self.segments_per_chunk or (1,) * len(self.placement)

    @property
    def segment_placement(self) -> tuple[int, ...]:
        """Pipeline rank of each segment."""
        counts = zip(self.placement, self.segment_counts, strict=True)
        return tuple(rank for rank, count in counts for _ in range(count))

    def segment_bounds(self, bounds: Sequence[range]) -> list[range]:
        """Layers of each segment, from those of each chunk: one layer, or the rest of a chunk."""
        return [part for span, count in zip(bounds, self.segment_counts, strict=True) for part in _split(span, count)]

    @property
    def stages(self) -> int:
        return max(self.placement) + 1

    @property
    def chunks_per_rank(self) -> int:
        return len(self.placement) // self.stages

    @cached_property
    def training(self) -> Callable[[int], Schedule]:
        """(number of micro-batches) -> validated schedule to execute, built once: large ones take seconds."""
        return cache(self._training)

    @cached_property
    def evaluation(self) -> Callable[[int], Schedule]:
        """Likewise forwards only, with transfers."""
        return cache(self._evaluation)

    def _training(self, micro_batches: int) -> Schedule:
        schedule = self.of_chunks(micro_batches)
        if self.segments_per_chunk is not None:
            wanted = RECOMPUTE[self.recompute]
            schedule = insert_recompute(
                refine(schedule, self.segments_per_chunk),
                lambda segment, m: segment in self.chosen or wanted(m, micro_batches),
            )
        return self._with_weights(schedule)

    def __getstate__(self) -> dict[str, Any]:
        """Without what can be built again, on the way to other ranks."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def of_chunks(self, micro_batches: int) -> Schedule:
        """Validated schedule before chunks are split into segments."""
        for schedule in self.decided:
            if schedule.micro_batches == micro_batches:
                return schedule
        stages, chunks = self.stages, self.chunks_per_rank
        if self.name == AUTO_SCHEDULE:
            return find_best(stages, micro_batches, self._costs_of, chunks, self.placement)
        schedule = complete(named_schedule(self.name, stages, micro_batches, chunks, self._costs_of))
        validate_schedule(schedule)
        return schedule

    def _evaluation(self, micro_batches: int) -> Schedule:
        return self._with_weights(insert_transfers(forward_only(self.segment_placement, micro_batches)))

    def _with_weights(self, schedule: Schedule) -> Schedule:
        if self.weights is not None:
            schedule = self.weights.insert(schedule)
        if self.weights is not None or self.segments_per_chunk is not None or schedule.forward_only:
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
    """Settles on a placement.

    Args:
        name: in `SCHEDULES`, or the best: auto. stages: pipeline ranks.
        chunks_per_rank: see `chunks_of_schedule`; auto chooses 1 or 2 when not given.
        micro_batches: of a usual step: auto takes the placement that is best for them.
        costs_of: costs of the chunks of a placement; equal ones when not given.
    Raises:
        ValueError: an unknown name, sizes below 1, chunks that the schedule cannot place.
    """
    for flag, value in (("--pipeline-model-parallel-size", stages), ("number of micro-batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    chunks_per_rank = chunks_of_schedule(name, chunks_per_rank)
    costs_of = costs_of or equal_costs(stages)
    decided: tuple[Schedule, ...] = ()
    if name == AUTO_SCHEDULE:
        placement = loop_placement(1)
        if stages > 1 or chunks_per_rank != 1:
            decided = (find_best(stages, micro_batches, costs_of, chunks_per_rank),)
            placement = decided[0].placement
    else:
        placement = SCHEDULES[name].placement(stages, chunks_per_rank or 1)
    return ScheduleChoice(name, placement, tuple(costs_of(placement)), decided)


def generate(
    name: str,
    stages: int,
    micro_batches: int,
    chunks_per_rank: int | None = None,
    costs_of: CostsOf | None = None,
) -> Schedule:
    """Generates one validated schedule with transfers and reduction of gradients. Arguments as of `plan_schedule`."""
    return plan_schedule(name, stages, chunks_per_rank, micro_batches, costs_of).training(micro_batches)


def chunks_of_schedule(name: str, asked: int | None = None) -> int | None:
    """Number of chunks on each pipeline rank: as many as asked for, otherwise what the schedule stands for.

    None: auto may choose. Raises ValueError for an unknown name, and for chunks that the schedule cannot place.
    """
    named = None if name == AUTO_SCHEDULE else SCHEDULES[name]
    if asked is not None and asked < 1:
        raise ValueError(f"{FLAG} must be at least 1, got {asked}")
    if named is None or (named.any_chunks and asked is not None and asked >= named.chunks):
        return asked
    if asked not in (None, named.chunks):
        needs = f"needs {named.chunks} or more" if named.any_chunks else f"computes {named.chunks} chunk(s)"
        raise ValueError(f"{FLAG} {asked}: --pipeline-schedule {name} {needs} per pipeline rank; leave the flag out")
    return named.chunks


def _split(span: range, count: int) -> list[range]:
    """A layer each, and the rest in the last part."""
    starts = [span.start + at for at in range(count)]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], span.stop], strict=True)]
