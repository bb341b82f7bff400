"""The fewest seconds of forwards that are computed again, so that no pipeline rank needs more memory than it may.

What a rank holds at each of its actions is a sum over the forwards before it, whatever is computed again: a linear
function of choices between 0 and 1. Which of them keep all these sums within the budget for the least time is a mixed
integer program, and is solved as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasnn.schedule.actions import Kind, Schedule
from megasnn.schedule.memory import UnitMemory, moments
from megasnn.schedule.offload import insert_offload
from megasnn.schedule.refine import insert_recompute

SECONDS = 4.0  # for all ranks together, of all orders that are compared
GAP = 1e-3  # a choice that is this much dearer than the best one is good enough
MB = 1e-6

Chosen = frozenset[tuple[int, int]]
"""(unit, micro-batch) of the forwards that are computed again."""


class BudgetError(ValueError):
    """No choice keeps the budget.

    Attributes:
        least: bytes that one keeps; the message has them, too.
    """

    def __init__(self, budget: float, least: float) -> None:
        self.least = least
        super().__init__(
            f"--memory-budget {budget * MB:g} cannot be kept, whatever is computed again: the least is "
            f"--memory-budget {np.ceil(least * MB):g}; or use a smaller --micro-batch-size"
        )


def within_budget(
    schedule: Schedule,
    units: Sequence[UnitMemory],
    budget: float,
    offloads: bool = False,
    seconds: float = SECONDS,
    exchanged: Sequence[int] = (),
) -> Chosen:
    """The cheapest choice.

    Args:
        schedule: of units, complete, in which nothing is computed again.
        budget: bytes that each rank may need.
        offloads: whether what forwards are computed again from is moved to the host's memory meanwhile.
        seconds: for the search.
        exchanged: of each rank, the bytes that travel to and from those who own rows; none when not given.
    Raises:
        BudgetError: none keeps it.
    """
    whole = insert_recompute(schedule, lambda unit, m: True)
    whole = insert_offload(whole) if offloads else whole
    exchanged = exchanged or [0] * schedule.ranks
    ranks = [_Rank.of(whole, rank, units, exchanged[rank]) for rank in range(schedule.ranks)]
    chosen: set[tuple[int, int]] = set()
    short = []
    for rank in ranks:
        found = rank.cheapest(budget, seconds / len(ranks))
        if found is None:  # there is none, or it was not found in time
            found, least = rank.least(seconds / len(ranks))
            if least > budget:
                short.append(least)
        chosen |= found
    if short:
        raise BudgetError(budget, max(short))
    return frozenset(chosen)


@dataclass(frozen=True)
class _Rank:
    """What a rank needs at each of its actions: `fixed + slopes @ choice`, in MB.

    Attributes:
        choices: (unit, micro-batch) that may be computed again. seconds: what that costs.
    """

    choices: list[tuple[int, int]]
    seconds: NDArray[np.float64]
    fixed: NDArray[np.float64]
    slopes: NDArray[np.float64]

    @classmethod
    def of(cls, schedule: Schedule, rank: int, units: Sequence[UnitMemory], exchanged: int) -> _Rank:
        """Args: schedule: in which all is computed again that can be."""
        actions = schedule.actions[rank]
        choices = [(unit, m) for unit, kind, m in actions if kind is Kind.RECOMPUTE and m is not None]
        # One, and the share of each choice, as vectors: a sum is a place for what is fixed, and one for each choice.
        axes = np.eye(len(choices) + 1)
        place = {choice: index for index, choice in enumerate(choices, start=1)}
        needed = [
            each.kept + each.working + each.messages
            for each in moments(schedule, rank, units, axes[0], lambda unit, m: axes[place[unit, m]], exchanged)
        ]
        seconds = np.array([units[unit].again for unit, _ in choices])
        table = np.array(needed).reshape(-1, len(choices) + 1) * MB
        return cls(choices, seconds, table[:, 0], table[:, 1:])

    def cheapest(self, budget: float, seconds: float) -> set[tuple[int, int]] | None:
        """The choice that costs least; None where none is found that keeps the budget, bytes."""
        room = budget * MB - self.fixed
        tight = self.fixed + np.maximum(self.slopes, 0).sum(1) > budget * MB
        if not tight.any():
            return set()
        if not self.choices:
            return None
        # Among those that take no time, the fewest.
        found = _solved(self.seconds + 1e-9, self.slopes[tight], room[tight], len(self.choices), seconds)
        return None if found is None else self._taken(found)

    def least(self, seconds: float) -> tuple[set[tuple[int, int]], float]:
        """The choice that needs least, and its bytes."""
        if not self.choices:
            return set(), float(self.fixed.max(initial=0.0)) / MB
        count = len(self.choices)
        # The largest sum is one more variable.
        table = np.hstack([self.slopes, -np.ones((len(self.slopes), 1))])
        found = _solved(np.eye(count + 1)[count], table, -self.fixed, count, seconds)
        choice = np.ones(count) if found is None else found[:count].round()
        return self._taken(choice), float((self.fixed + self.slopes @ choice).max()) / MB

    def _taken(self, choice: NDArray[np.float64]) -> set[tuple[int, int]]:
        return {each for each, taken in zip(self.choices, choice, strict=True) if taken > 0.5}


def _solved(costs: Any, table: Any, most: Any, whole: int, seconds: float) -> NDArray[np.float64] | None:
    """The cheapest x >= 0 with `table @ x <= most`, of which the first `whole` are 0 or 1; None where none is found."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # only a budget needs it

    integers = np.arange(len(costs)) < whole
    result = milp(
        costs,
        integrality=integers,
        bounds=Bounds(0, np.where(integers, 1.0, np.inf)),
        constraints=LinearConstraint(table, -np.inf, most),
        options={"time_limit": seconds, "mip_rel_gap": GAP},
    )
    return None if result.x is None else np.asarray(result.x)
