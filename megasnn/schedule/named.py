"""Named schedules, in the table `SCHEDULES`, and the search for the fastest one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megasnn.common.registry import Registry
from megasnn.schedule.actions import Schedule
from megasnn.schedule.costs import ChunkCost, chunk_costs
from megasnn.schedule.fill import Ticks
from megasnn.schedule.generators import ZeroBubble, gpipe, half_limit, interleaved, min_limit, one_f_one_b
from megasnn.schedule.partition import PLACEMENTS
from megasnn.schedule.passes import complete
from megasnn.schedule.simulate import simulate
from megasnn.schedule.validate import validate_schedule

AUTO_SCHEDULE = "auto"  # the schedule `find_best` finds
CostsOf = Callable[[tuple[int, ...]], Sequence[ChunkCost]]
"""Placement -> cost of each chunk."""
GAPS = (1.0, 0.5)  # shortest waits filled by a weight gradient, as fractions of its time
EQUAL = 1 + 1e-9  # makespans within this factor count as equal


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule with either an `order` or a `zero_bubble`.

    Attributes:
        summary: for --help.
        order: (stages, micro-batches, chunks per rank) -> computations, with whole backwards.
        zero_bubble: (stages) -> candidate orders with split backwards.
        chunks: default chunks per rank.
        any_chunks: other numbers are possible; with fewer than `chunks` it is another schedule.
        placed: name in `PLACEMENTS`.
    """

    summary: str
    order: Callable[[int, int, int], Schedule] | None = None
    zero_bubble: Callable[[int], ZeroBubble] | None = None
    chunks: int = 1
    any_chunks: bool = False
    placed: str = "loop"

    @property
    def looks_at_costs(self) -> bool:
        return self.zero_bubble is not None

    def can_place(self, chunks_per_rank: int) -> bool:
        return self.any_chunks or chunks_per_rank == self.chunks

    def placement(self, stages: int, chunks: int) -> tuple[int, ...]:
        """Each chunk's pipeline rank."""
        return PLACEMENTS[self.placed](stages, chunks)


SCHEDULES: Registry[NamedSchedule] = Registry(
    "--pipeline-schedule",
    {
        "gpipe": NamedSchedule("all forwards, then all backwards", lambda p, m, v: gpipe(p, m)),
        "1f1b": NamedSchedule("one forward and one backward in turn", lambda p, m, v: one_f_one_b(p, m)),
        "interleaved": NamedSchedule("1f1b over several chunks on each rank", interleaved, chunks=2, any_chunks=True),
        "zb1p": NamedSchedule(
            "1f1b's order and memory, a third of its bubble", zero_bubble=lambda p: ZeroBubble("zb1p", p, p)
        ),
        "zb2p": NamedSchedule(
            "no bubble, with twice that memory", zero_bubble=lambda p: ZeroBubble("zb2p", p, 2 * p, pace=2)
        ),
        "zbv": NamedSchedule(
            "two chunks a rank as a V, no bubble with 1f1b's memory",
            zero_bubble=lambda p: ZeroBubble("zbv", p, p, v=True),
            chunks=2,
            placed="v",
        ),
        "v-half": NamedSchedule(
            "a V with about half of that memory",
            zero_bubble=lambda p: ZeroBubble("v-half", p, half_limit(p), v=True),
            chunks=2,
            placed="v",
        ),
        "v-min": NamedSchedule(
            "a V with about a third of it",
            zero_bubble=lambda p: ZeroBubble("v-min", p, min_limit(p), v=True),
            chunks=2,
            placed="v",
        ),
    },
    also=(AUTO_SCHEDULE,),
)


def equal_costs(stages: int) -> CostsOf:
    """Unit time per stage for forward, input gradient and weight gradient; transfers take none."""
    return partial(chunk_costs, [ChunkCost(1, 1, 1)] * stages)


def looks_at_costs(name: str) -> bool:
    """Whether chunk costs affect this schedule, or the search."""
    return name == AUTO_SCHEDULE or SCHEDULES[name].looks_at_costs


def named_schedule(
    name: str, stages: int, micro_batches: int, chunks_per_rank: int | None, costs_of: CostsOf
) -> Schedule:
    """Chunk costs decide where weight gradients go.

    Raises ValueError for an unknown name, and for a schedule that cannot keep its memory limit.
    """
    named = SCHEDULES[name]
    if named.order is not None:
        order = named.order(stages, micro_batches, chunks_per_rank or named.chunks)
        return replace(order, name=name)
    assert named.zero_bubble is not None
    zero_bubble = named.zero_bubble(stages)
    ticks = Ticks.of(zero_bubble.placement, costs_of(zero_bubble.placement), micro_batches)
    filled = zero_bubble.fill(ticks, micro_batches)
    if filled is None:
        raise ValueError(f"--pipeline-schedule {name} cannot keep its memory on {stages} stages")
    return filled.schedule


def find_best(
    stages: int,
    micro_batches: int,
    costs_of: CostsOf,
    chunks_per_rank: int | None = None,
    placement: tuple[int, ...] | None = None,
) -> Schedule:
    """Schedule with the smallest simulated makespan; ties go to fewer activations.

    Candidates: every named schedule, filled by these costs and by equal ones; 1F1B with every smaller memory limit; V
    schedules with several limits and shorter gaps.

    Args:
        chunks_per_rank: None: 1 or 2.
        placement: searches only this one.
    """
    counts = (1, 2) if chunks_per_rank is None else (chunks_per_rank,)
    search = _Search(micro_batches, costs_of)
    for candidate in _candidates(stages, micro_batches, counts):
        if placement in (None, candidate.placement):
            search.try_filling(candidate)
    # Named schedules with whole backwards, and zero-bubble ones as equal costs fill them: filling is greedy, so that
    # these costs need not give the better place to a weight gradient.
    for name, named in SCHEDULES.items():
        for count in filter(named.can_place, counts):
            if placement in (None, named.placement(stages, count)):
                search.consider(named_schedule(name, stages, micro_batches, count, equal_costs(stages)))
    assert search.best is not None, "1f1b can always be placed"
    validate_schedule(search.best)
    return search.best


def _candidates(stages: int, micro_batches: int, counts: tuple[int, ...]) -> Iterator[ZeroBubble]:
    # Likely winners first: their makespan cuts the others short.
    named = [each.zero_bubble(stages) for each in SCHEDULES.values() if each.zero_bubble]
    if 2 in counts:
        fastest, *others = [candidate for candidate in named if candidate.v]
        yield fastest
        for gap in GAPS:
            for limit in (stages + stages // 2, 2 * stages):
                yield ZeroBubble(f"V within {limit}", stages, limit, v=True, gap=gap)
        yield from others
        for limit in sorted({stages, half_limit(stages), min_limit(stages)}, reverse=True):
            yield ZeroBubble(f"V within {limit}", stages, limit, v=True, gap=GAPS[1])
    if 1 in counts:
        for candidate in named:
            if not candidate.v:
                yield candidate
        # A rank never holds more than all micro-batches.
        for limit in range(min(stages - 1, micro_batches), 0, -1):
            yield ZeroBubble(f"zb1p within {limit}", stages, limit, most=limit - 1)


class _Search:
    def __init__(self, micro_batches: int, costs_of: CostsOf) -> None:
        self._micro_batches = micro_batches
        self._costs_of = costs_of
        self.best: Schedule | None = None
        self.makespan = math.inf
        self.activations = math.inf

    def try_filling(self, candidate: ZeroBubble) -> None:
        """Gives up once the candidate cannot win."""
        costs = self._costs_of(candidate.placement)
        ticks = Ticks.of(candidate.placement, costs, self._micro_batches)
        longest = self.makespan * EQUAL / ticks.duration
        filled = candidate.fill(ticks, self._micro_batches, (longest, math.inf))
        if filled is not None:
            self.consider(filled.schedule)

    def consider(self, order: Schedule) -> None:
        schedule = complete(order)
        simulation = simulate(schedule, self._costs_of(order.placement))
        activations = max(simulation.peak_activations)
        if self._beats_best(schedule, simulation.makespan, activations):
            self.best = schedule
            self.makespan = simulation.makespan
            self.activations = activations

    def _beats_best(self, schedule: Schedule, makespan: float, activations: float) -> bool:
        if self.best is None or makespan * EQUAL < self.makespan:
            return True
        if makespan > self.makespan * EQUAL:
            return False
        return _preference(activations, schedule) < _preference(self.activations, self.best)


def _preference(activations: float, schedule: Schedule) -> tuple[float, int, bool]:
    """Among equally fast schedules: fewer activations, fewer chunks, whole backwards."""
    splits = schedule.name not in SCHEDULES or SCHEDULES[schedule.name].looks_at_costs
    return activations, schedule.segments, splits
