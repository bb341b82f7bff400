"""Named schedules, in the table `SCHEDULES`, and the search for the best one.

The search tries the likely schedules first, and none further than until it cannot win any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megasnn.common.registry import Registry
from megasnn.schedule.actions import Schedule
from megasnn.schedule.costs import ChunkCost, chunk_costs
from megasnn.schedule.fill import Ticks
from megasnn.schedule.generators import ZeroBubble, gpipe, half_limit, interleaved, min_limit, one_f_one_b
from megasnn.schedule.partition import PLACEMENTS
from megasnn.schedule.passes import complete
from megasnn.schedule.simulate import simulate
from megasnn.schedule.validate import validate_schedule

AUTO_SCHEDULE = "auto"  # stands for the best that a search finds

CostsOf = Callable[[tuple[int, ...]], Sequence[ChunkCost]]
"""Placement -> cost of each chunk."""
GAPS = (1.0, 0.5)  # parts of a weight gradient's time that a rank waits at least before it takes one in
EQUAL = 1 + 1e-9  # makespans that differ by less are the same


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule that a user can ask for.

    Attributes:
        summary: for --help.
        order: (stages, micro-batches, chunks on each rank) -> the schedule, computing alone, with backwards in one
            part.
        zero_bubble: of a schedule that splits backwards instead, and puts weight gradients by costs: (stages) -> its
            orders and limit.
        chunks: on each rank when no number is given.
        any_chunks: it can place any other number, too; with fewer than `chunks` it is another schedule.
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
        """True if it can place so many chunks on each rank."""
        return self.any_chunks or chunks_per_rank == self.chunks

    def placement(self, stages: int, chunks: int) -> tuple[int, ...]:
        """Pipeline rank of each chunk."""
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
    """One unit of time for forward, input gradient and weight gradient of every stage, none for transfers."""
    return per_stage([ChunkCost(1, 1, 1)] * stages)


def per_stage(stages: Sequence[ChunkCost]) -> CostsOf:
    """Costs of whole stages; a chunk's are its share of them."""
    return lambda placement: chunk_costs(stages, placement)


def looks_at_costs(name: str) -> bool:
    """True if the costs of the chunks make a difference to a named schedule, or to the search."""
    return name == AUTO_SCHEDULE or SCHEDULES[name].looks_at_costs


def named_schedule(
    name: str, stages: int, micro_batches: int, chunks_per_rank: int | None, costs_of: CostsOf
) -> Schedule:
    """A named schedule, computing alone.

    Args:
        chunks_per_rank: the schedule's own number when not given.
        costs_of: costs of each chunk, which decide where weight gradients go.
    """
    named = SCHEDULES[name]
    if named.order is not None:
        return replace(named.order(stages, micro_batches, chunks_per_rank or named.chunks), name=name)
    assert named.zero_bubble is not None, "a schedule has either"
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
    """Finds the schedule of least simulated makespan; of equally fast ones one that holds least.

    Tried are all named ones, filled by these costs and by equal ones, 1F1B's order with every smaller memory, and the V
    schedules with several memory limits and shorter gaps filled. It is never slower than a named one. With a
    `placement`, only schedules on it are looked at.
    """
    counts = (1, 2) if chunks_per_rank is None else (chunks_per_rank,)
    search = _Search(micro_batches, costs_of)
    candidates = [each for each in _candidates(stages, micro_batches, counts) if placement in (None, each.placement)]
    for candidate in candidates:
        search.try_filling(candidate)
    for name, named in SCHEDULES.items():
        for count in filter(named.can_place, counts):
            if placement in (None, named.placement(stages, count)):
                search.consider(named_schedule(name, stages, micro_batches, count, equal_costs(stages)))
    assert search.best is not None, "1f1b can always be placed"
    validate_schedule(search.best)
    return search.best


def _candidates(stages: int, micro_batches: int, counts: tuple[int, ...]) -> Iterator[ZeroBubble]:
    """Zero-bubble schedules, those that are likely to be fast first: what they take is a bound for the others."""
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
        yield from (candidate for candidate in named if not candidate.v)
        for limit in range(min(stages - 1, micro_batches), 0, -1):  # more are not there to be held
            yield ZeroBubble(f"zb1p within {limit}", stages, limit, most=limit - 1)


class _Search:
    """Keeps the best schedule of those that were tried.

    Attributes:
        best: None so far. makespan, activations: of `best`, in the units of the costs; the most that a rank holds.
    """

    def __init__(self, micro_batches: int, costs_of: CostsOf) -> None:
        self._micro_batches, self._costs_of = micro_batches, costs_of
        self.best: Schedule | None = None
        self.makespan = self.activations = math.inf

    def try_filling(self, candidate: ZeroBubble) -> None:
        """Fills by the costs, for as long as that can still win."""
        costs, count = self._costs_of(candidate.placement), self._micro_batches
        ticks = Ticks.of(candidate.placement, costs, count)
        filled = candidate.fill(ticks, count, (self.makespan * EQUAL / ticks.duration, math.inf))
        if filled is not None:
            self.consider(filled.schedule)

    def consider(self, order: Schedule) -> None:
        """Simulates a schedule that only computes, and takes it if it is better than the best one."""
        schedule = complete(order)
        found = simulate(schedule, self._costs_of(order.placement))
        makespan, activations = found.makespan, max(found.peak_activations)
        as_fast = makespan <= self.makespan * EQUAL
        if (
            self.best is None
            or makespan * EQUAL < self.makespan
            or as_fast
            and _preference(activations, schedule) < _preference(self.activations, self.best)
        ):
            self.best, self.makespan, self.activations = schedule, makespan, activations


def _preference(activations: float, schedule: Schedule) -> tuple[float, int, bool]:
    """Among equally fast ones: what holds less, in fewer chunks, with backwards in one part."""
    splits = schedule.name not in SCHEDULES or SCHEDULES[schedule.name].looks_at_costs
    return activations, schedule.segments, splits
