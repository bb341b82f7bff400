"""Passes for weights that replicas shard by rows: when units are gathered and freed, and gradients reduce-scattered.

They take a complete schedule of units. While a unit computes, its own weights are there, and those of the other unit
that the rank uses next are gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megasnn.schedule.actions import FINISHING, SENDS, SHARDING, USES_WEIGHTS, Action, Kind, Schedule
from megasnn.schedule.memory import weights_held
from megasnn.schedule.validate import validate_weights

AT_ONCE = 2  # gathers on their way: of the unit that computes next, and of the one behind it


@dataclass(frozen=True)
class SharedWeights:
    """Weights to gather.

    Attributes:
        unit_bytes: of the gathered weights of each unit; 0: it has none.
        scattered: units whose gradients are scattered after every micro-batch.
        ranks: that shard them.
    """

    unit_bytes: tuple[int, ...]
    scattered: frozenset[int] = frozenset()
    ranks: int = 2

    def insert(self, schedule: Schedule) -> Schedule:
        """Adds UNSHARD, RESHARD and REDUCE_SCATTER, proved right."""
        scattered = schedule if schedule.forward_only else insert_reduce_scatters(schedule, self.scattered)
        complete = insert_unshards(scattered, self.unit_bytes)
        validate_weights(complete, self.unit_bytes, self.scattered)
        return complete

    def gathered_and_buffers(self, schedule: Schedule, rank: int) -> tuple[int, int]:
        """Most bytes of gathered weights that a rank holds, and of what comes, and with more than two ranks goes, on
        its way."""
        units = [self.unit_bytes[unit] for unit in schedule.units_of(rank) if self.unit_bytes[unit]]
        travelling = max(units, default=0) * (self.ranks - 1) // self.ranks * (1 if self.ranks == 2 else 2)
        return max(weights_held(schedule, rank, self.unit_bytes)), travelling * min(AT_ONCE, len(units))


def insert_unshards(schedule: Schedule, unit_bytes: Sequence[int]) -> Schedule:
    """Adds an UNSHARD before computations that do not find their unit's weights, and a RESHARD behind the last use.

    A unit without bytes of weights has no action.
    """
    return replace(schedule, actions=tuple(_with_unshards(row, unit_bytes) for row in schedule.actions))


def _with_unshards(row: Sequence[Action], unit_bytes: Sequence[int]) -> tuple[Action, ...]:
    uses = [(at, unit) for at, (unit, kind, _) in enumerate(row) if kind in USES_WEIGHTS and unit_bytes[unit]]
    result: list[Action] = []
    live: Collection[int] = ()
    start = 0
    for number, (at, unit) in enumerate(uses):
        later = (uses[place][1] for place in range(number, len(uses)))
        wanted = dict.fromkeys((unit, next((each for each in later if each != unit), unit)))
        result += [Action(each, Kind.RESHARD) for each in live if each not in wanted]
        result += [Action(each, Kind.UNSHARD) for each in wanted if each not in live]
        end = at + 1
        while end < len(row) and row[end].kind in SENDS:  # others wait for what is sent
            end += 1
        result += row[start:end]
        live, start = wanted, end
    return (*result, *(Action(each, Kind.RESHARD) for each in live), *row[start:])


def insert_reduce_scatters(schedule: Schedule, units: Collection[int]) -> Schedule:
    """Adds a REDUCE_SCATTER behind each B or W of these units."""
    return replace(schedule, actions=tuple(_with_reduce_scatters(row, frozenset(units)) for row in schedule.actions))


def _with_reduce_scatters(row: Sequence[Action], units: Collection[int]) -> tuple[Action, ...]:
    result: list[Action] = []
    due: Action | None = None
    for action in row:
        if due is not None and action.kind not in SENDS | SHARDING:  # others wait for what is sent and gathered
            result.append(due)
            due = None
        result.append(action)
        if action.kind in FINISHING and action.unit in units:
            due = Action(action.unit, Kind.REDUCE_SCATTER, action.micro_batch)
    return (*result, *([] if due is None else [due]))
