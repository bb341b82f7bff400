"""From a schedule's name to the schedules that an executor runs, for any number of micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from megasnn.schedule.actions import Schedule
from megasnn.schedule.basic import forward_only
from megasnn.schedule.budget import Choice
from megasnn.schedule.costs import ChunkCost
from megasnn.schedule.named import (
    AUTO,
    SCHEDULES,
    CostsOf,
    complete,
    equal_costs,
    keep_limit,
    named_schedule,
    possible_chunks,
)
from megasnn.schedule.partition import loop_placement
from megasnn.schedule.passes import insert_transfers
from megasnn.schedule.refine import NEVER, RECOMPUTE, insert_recompute, refine
from megasnn.schedule.search import find_best
from megasnn.schedule.validate import ScheduleError, validate
from megasnn.schedule.validate_weights import validate_replicas
from megasnn.schedule.weights import SharedWeights

FLAG = "--num-virtual-stages-per-pipeline-rank"


def generate(
    name: str,
    stages: int,
    micro_batches: int,
    chunks_per_rank: int | None = None,
    costs_of: CostsOf | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """A validated schedule with transfers and gradient sync, of a name in `SCHEDULES`, or the best: auto.

    Args:
        stages: pipeline ranks.
        chunks_per_rank: the schedule's own number when not given; auto tries 1 and 2.
        costs_of: the costs of each chunk, which decide where weight gradients go; equal ones when not given.
        memory_limit: activations a rank may hold, in the unit of the costs (whole stages' micro-batches).
    Raises:
        ValueError: an unknown name, sizes below 1, chunks the schedule cannot place, or a limit it cannot keep.
    """
    _check_sizes(name, stages, micro_batches, chunks_per_rank)
    costs_of = costs_of or equal_costs(stages)
    if name == AUTO:
        return find_best(stages, micro_batches, costs_of, memory_limit, chunks_per_rank)
    schedule = complete(named_schedule(name, stages, micro_batches, chunks_per_rank, costs_of))
    keep_limit(schedule, costs_of, memory_limit)
    return schedule


def _check_sizes(name: str, stages: int, micro_batches: int, chunks_per_rank: int | None) -> None:
    named = None if name == AUTO else SCHEDULES[name]
    sizes = {"--pipeline-model-parallel-size": stages, "number of micro-batches": micro_batches, FLAG: chunks_per_rank}
    for flag, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    if named is not None and chunks_per_rank is not None and not possible_chunks(name, chunks_per_rank):
        raise ValueError(
            f"{FLAG} {chunks_per_rank}: --pipeline-schedule {name} computes {named.chunks} chunk(s) per pipeline rank"
        )


@dataclass(frozen=True)
class SchedulePlan:
    """How a run's micro-batches go through its pipeline, however many of them a step has.

    Attributes:
        name: of the schedule; "auto" is the best one on this placement, searched for each number of micro-batches.
        placement: the pipeline rank of each chunk.
        costs: of each chunk; equal ones when not given.
        memory_limit: activations that a rank may hold, in the unit of the costs (whole stages' micro-batches).
        decided: schedules that were settled on before, where ranks must not search for themselves; of chunks.
        units: how many units each chunk is executed in; None: the chunks as they are.
        recompute: a name in `RECOMPUTE`: which forwards of units are computed again.
        chosen: for some numbers of micro-batches, those in its place.
        weights: of units, where ranks share them by rows; None: every rank has its own whole.
    """

    name: str
    placement: tuple[int, ...]
    costs: tuple[ChunkCost, ...] | None = None
    memory_limit: float | None = None
    decided: tuple[Schedule, ...] = ()
    units: tuple[int, ...] | None = None
    recompute: str = NEVER
    chosen: Mapping[int, frozenset[Choice]] = field(default_factory=dict)
    weights: SharedWeights | None = None

    def in_units(self, bounds: Sequence[range], recompute: str) -> SchedulePlan:
        """The same, executed layer by layer.

        Args:
            bounds: the layers of each chunk. recompute: as the attribute.
        """
        return replace(self, units=tuple(max(1, len(span)) for span in bounds), recompute=recompute)

    def sharing(self, weights: SharedWeights, micro_batches: Collection[int]) -> SchedulePlan:
        """The same with weights that are gathered where they are used, in training and evaluation.

        Args:
            weights: of the units that are executed.
            micro_batches: how many of them the replicas have in a step.
        Raises:
            ValueError: another number of units, a limit that is too small, replicas that would not gather in the same
                order.
        """
        plan = replace(self, weights=weights)
        counts = sorted(set(micro_batches))
        schedules = [plan.training(count) for count in counts]
        try:
            validate_replicas(schedules)
        except ScheduleError as error:
            whole = f"allow {weights.whole(schedules[0])} bytes of gathered weights, which is all of a rank's"
            if weights.scattered:
                whole = f"scatter gradients once a step and {whole}"
            raise ValueError(
                f"replicas have {' and '.join(map(str, counts))} micro-batches in one step, and would not gather "
                f"weights in the same order; let them have equally many (--global-batch-size), or {whole}"
            ) from error
        return plan

    @property
    def units_of_chunks(self) -> tuple[int, ...]:
        """How many units each chunk is executed in."""
        return self.units or (1,) * len(self.placement)

    @property
    def executed_placement(self) -> tuple[int, ...]:
        """The pipeline rank of each unit, which is what the executor takes for a chunk."""
        counts = zip(self.placement, self.units_of_chunks, strict=True)
        return tuple(rank for rank, count in counts for _ in range(count))

    @property
    def wholes(self) -> tuple[int, ...]:
        """The chunk that each unit is of."""
        return tuple(chunk for chunk, count in enumerate(self.units_of_chunks) for _ in range(count))

    def unit_bounds(self, bounds: Sequence[range]) -> list[range]:
        """The layers of each unit, from those of each chunk: one layer, or what of a chunk is left."""
        return [part for span, count in zip(bounds, self.units_of_chunks, strict=True) for part in _cut(span, count)]

    @property
    def stages(self) -> int:
        return max(self.placement) + 1

    @property
    def chunks_per_rank(self) -> int:
        return len(self.placement) // self.stages

    def training(self, micro_batches: int) -> Schedule:
        """What is executed, validated, with transfers and gradient sync. Raises ValueError where it cannot keep the
        memory limit. Built once for each number: large ones take seconds."""
        if micro_batches not in self._built:
            self._built[micro_batches] = self._training(micro_batches)
        return self._built[micro_batches]

    @cached_property
    def _built(self) -> dict[int, Schedule]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what can be built again, on the way to other ranks."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def _training(self, micro_batches: int) -> Schedule:
        schedule = self.of_chunks(micro_batches)
        if self.units is not None:
            wanted, chosen = RECOMPUTE[self.recompute], self.chosen.get(micro_batches)
            schedule = insert_recompute(
                refine(schedule, self.units),
                lambda unit, m: wanted(m, micro_batches) if chosen is None else (unit, m) in chosen,
            )
        return self._with_weights(schedule)

    def of_chunks(self, micro_batches: int) -> Schedule:
        """The same before chunks are cut into units."""
        for schedule in self.decided:
            if schedule.micro_batches == micro_batches:
                return schedule
        stages, chunks, limit = self.stages, self.chunks_per_rank, self.memory_limit
        if self.name == AUTO:
            return find_best(stages, micro_batches, self._costs_of, limit, chunks, self.placement)
        return generate(self.name, stages, micro_batches, chunks, self._costs_of, limit)

    def evaluation(self, micro_batches: int) -> Schedule:
        """Forwards only, validated, with transfers."""
        return self._with_weights(insert_transfers(forward_only(self.executed_placement, micro_batches)))

    def _with_weights(self, schedule: Schedule) -> Schedule:
        if self.weights is not None:
            schedule = self.weights.insert(schedule)
        validate(schedule)
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
    memory_limit: float | None = None,
) -> SchedulePlan:
    """Settles on a placement.

    Args:
        chunks_per_rank: see `chunks_of_schedule`; auto chooses when not given.
        micro_batches: of a usual step: auto takes the placement that is best for them.
        costs_of: the costs of the chunks of a placement; equal ones when not given.
        memory_limit: as in `SchedulePlan`.
    Raises:
        ValueError: an unknown name, sizes below 1, chunks that the schedule cannot place, a limit it cannot keep.
    """
    chunks_per_rank = chunks_of_schedule(name, chunks_per_rank)
    costs_of = costs_of or equal_costs(stages)
    decided: tuple[Schedule, ...] = ()
    if name == AUTO:
        placement = loop_placement(1)
        if stages > 1 or chunks_per_rank != 1:
            decided = (find_best(stages, micro_batches, costs_of, memory_limit, chunks_per_rank),)
            placement = decided[0].placement
    else:
        assert chunks_per_rank is not None
        placement = SCHEDULES[name].placement(stages, chunks_per_rank)
    plan = SchedulePlan(name, placement, tuple(costs_of(placement)), memory_limit, decided)
    if memory_limit is None or decided:
        return plan
    return replace(plan, decided=(plan.of_chunks(micro_batches),))


def _cut(span: range, count: int) -> list[range]:
    """A layer each, and all that is left in the last part."""
    starts = [span.start + place for place in range(count)]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], span.stop], strict=True)]


def chunks_of_schedule(name: str, asked: int | None = None) -> int | None:
    """The chunks on each pipeline rank: as many as asked for, otherwise what the schedule stands for.

    None: auto may choose. Raises ValueError for an unknown name, and for chunks that the schedule cannot place.
    """
    named = None if name == AUTO else SCHEDULES[name]
    if asked is not None and asked < 1:
        raise ValueError(f"{FLAG} must be at least 1, got {asked}")
    if named is None or (named.any_chunks and asked is not None and asked >= named.chunks):
        return asked
    if asked not in (None, named.chunks):
        needs = f"needs {named.chunks} or more" if named.any_chunks else f"computes {named.chunks} chunk(s)"
        raise ValueError(f"{FLAG} {asked}: --pipeline-schedule {name} {needs} per pipeline rank; leave the flag out")
    return named.chunks
