"""Chooses the forwards to compute again so that no pipeline rank needs more memory than its budget.

Greedy: layers are taken in the order of bytes saved per second of computing until `moments`, which counts bytes over
the rank's actions, keeps the budget. Of these the dearest layers that are not needed after all are given back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from megasnn.pipeline.peak_memory import UnitMemory, moments
from megasnn.schedule import Kind, Schedule
from megasnn.schedule.passes import with_recompute
from megasnn.schedule.plan import Repeated

MB = 1e-6


class BudgetError(ValueError):
    """No choice keeps the budget.

    Attributes:
        least: bytes with all forwards computed again; the message has them, too.
    """

    def __init__(self, budget: float, least: float) -> None:
        self.least = least
        super().__init__(
            f"--memory-budget {budget * MB:g} cannot be kept with all forwards computed again: the least is "
            f"--memory-budget {math.ceil(least * MB)}; or use a smaller --micro-batch-size"
        )


def within_budget(
    schedule: Schedule, units: Sequence[UnitMemory], budget: float, exchanged: Sequence[int] = ()
) -> Repeated:
    """Chooses the forwards to compute again.

    Args:
        schedule: of units, complete, in which nothing is computed again.
        budget: bytes that each rank may need.
        exchanged: of each rank, the bytes that travel to and from those who own rows; none when not given.
    Raises:
        BudgetError: more is needed even with all of them.
    """
    chosen: Repeated = frozenset()
    most = 0
    for rank in range(schedule.ranks):
        order = _cheapest_first(schedule, rank, units)
        need = partial(_need, schedule, rank, units, exchanged[rank] if exchanged else 0)
        if need(()) <= budget:
            continue
        most = max(most, need(order))
        short, enough = 0, len(order)
        while enough - short > 1:
            middle = (short + enough) // 2
            short, enough = (short, middle) if need(order[:middle]) <= budget else (middle, enough)
        mine = frozenset(order[:enough])
        for unit in sorted({unit for unit, _ in mine}, key=lambda unit: -units[unit].again):
            without = frozenset(each for each in mine if each[0] != unit)
            if need(without) <= budget:
                mine = without
        chosen |= mine
    if most > budget:
        raise BudgetError(budget, most)
    return chosen


def _need(
    schedule: Schedule, rank: int, units: Sequence[UnitMemory], exchanged: int, chosen: Collection[tuple[int, int]]
) -> int:
    """Bytes of a rank where these forwards are computed again."""
    taken = frozenset(chosen)
    row = with_recompute(schedule.actions[rank], lambda unit, m: (unit, m) in taken)
    rows = (*schedule.actions[:rank], row, *schedule.actions[rank + 1 :])
    found = moments(replace(schedule, actions=rows), rank, units, exchanged)
    return max((moment.total for moment in found), default=0)


def _cheapest_first(schedule: Schedule, rank: int, units: Sequence[UnitMemory]) -> list[tuple[int, int]]:
    """All forwards of a rank that can be computed again: the most bytes per second first, a unit's together.

    Of a unit the last micro-batch is first: when it is computed again, the activations of those before it are gone.
    """
    repeated = with_recompute(schedule.actions[rank], lambda unit, m: True)
    choices = [(unit, m) for unit, kind, m in repeated if kind is Kind.RECOMPUTE and m is not None]

    def rank_of(choice: tuple[int, int]) -> tuple[float, int, int]:
        number, m = choice
        unit = units[number]
        return -(unit.held - unit.entering) / max(unit.again, 1e-9), number, -m

    return sorted((each for each in choices if units[each[0]].held > units[each[0]].entering), key=rank_of)
