"""Kept inputs of forwards that are computed again are moved to the host's memory, and back before they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megasnn.schedule.actions import COMPUTE, PROPAGATING, Action, Kind, Schedule
from megasnn.schedule.memory import UnitMemory

APART = 3  # computations from a forward to its backward, behind which moving its input gains something


def insert_offload(schedule: Schedule) -> Schedule:
    """Adds an OUT behind each forward that is computed again later, and an IN one computation before that.

    So its input travels while the rank computes. Where no more than `APART` computations lead from the forward to its
    backward, and for the first chunk, whose input lies in the batch, there is nothing to gain. Second forwards do not
    count: what is moved does not depend on what else is computed again.
    """
    return replace(schedule, actions=tuple(_with_moves(row) for row in schedule.actions))


def _with_moves(row: Sequence[Action]) -> tuple[Action, ...]:
    computed = [index for index, action in enumerate(row) if action.kind in COMPUTE - {Kind.RECOMPUTE}]
    place = {row[index]: number for number, index in enumerate(computed)}
    behind: dict[int, Action] = {}  # by the index of the action that they stand at
    before: dict[int, list[Action]] = {}
    for unit, kind, m in row:
        if kind is not Kind.RECOMPUTE or unit == 0:
            continue
        first = place[Action(unit, Kind.FORWARD, m)]
        number = next(place[each] for kind in PROPAGATING if (each := Action(unit, kind, m)) in place)
        if number - first > APART:
            behind[computed[first]] = Action(unit, Kind.OFFLOAD, m)
            before.setdefault(computed[number - 1], []).append(Action(unit, Kind.FETCH, m))
    result: list[Action] = []
    for index, action in enumerate(row):
        result += [*before.get(index, ()), action]
        if index in behind:
            result.append(behind[index])
    return tuple(result)


def most_on_host(schedule: Schedule, rank: int, units: Sequence[UnitMemory]) -> float:
    """The most bytes that a rank has moved to its host's memory at a time."""
    held = most = 0.0
    for unit, kind, _ in schedule.actions[rank]:
        if kind is Kind.OFFLOAD:
            held += units[unit - 1].message
        elif kind is Kind.FETCH:
            held -= units[unit - 1].message
        most = max(most, held)
    return most
