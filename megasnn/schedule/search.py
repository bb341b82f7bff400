"""Search for the best schedule: the likely ones first, and none further than until it cannot win any more."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megasnn.schedule.actions import Schedule
from megasnn.schedule.fill import Ticks
from megasnn.schedule.named import SCHEDULES, CostsOf, equal_costs, named_schedule
from megasnn.schedule.passes import complete
from megasnn.schedule.simulate import simulate
from megasnn.schedule.validate import validate
from megasnn.schedule.zero_bubble import ZeroBubble, half_limit, min_limit

GAPS = (1.0, 0.5)  # parts of a weight gradient's time that a rank waits at least before it takes one in
EQUAL = 1 + 1e-9  # makespans that differ by less are the same


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
    validate(search.best)
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
        filled = candidate.fill(ticks, count, (self.makespan * EQUAL / ticks.unit, math.inf))
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
    return activations, schedule.units, splits
