"""Proves, before anything runs, that weights are there where they are used, and that replicas meet each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest

from megasnn.schedule.actions import COLLECTIVES, USES_WEIGHTS, Action, Kind, Place, Schedule
from megasnn.schedule.validate import ScheduleError


def validate_weights(
    schedule: Schedule, unit_bytes: Sequence[int], limit: int | None = None, scattered: Collection[int] = ()
) -> None:
    """Raises ScheduleError for a schedule, valid without that, whose gathers, frees or scatters are wrong.

    Weights are gathered where they are used, not twice, and freed once; at the end none are left. No rank ever holds
    more of them than the limit. Every gradient of the units that are scattered is; no other.

    Args:
        unit_bytes: what the gathered weights of each unit take; 0: it has none.
        limit: bytes. scattered: units.
    """
    for rank, row in enumerate(schedule.actions):
        _check_gathers(schedule, rank, unit_bytes, limit)
        if not schedule.forward_only:
            _check_scatters(schedule, rank, row, scattered)


def _check_gathers(schedule: Schedule, rank: int, unit_bytes: Sequence[int], limit: int | None) -> None:
    row, live, held = schedule.actions[rank], set[int](), 0
    for index, (unit, kind, _) in enumerate(row):
        problem = ""
        if kind in USES_WEIGHTS and unit_bytes[unit] and unit not in live:
            problem = f"{row[index]} needs the weights of unit {unit}, which are not gathered"
        elif kind is Kind.GATHER_WEIGHTS:
            if not unit_bytes[unit]:
                problem = f"{row[index]}: unit {unit} has no weights"
            elif unit in live:
                problem = f"{row[index]}: the weights of unit {unit} are gathered already"
            live.add(unit)
            held += unit_bytes[unit]
            if not problem and limit is not None and held > limit:
                problem = f"{row[index]}: {held} bytes of gathered weights where the limit is {limit}"
        elif kind is Kind.FREE_WEIGHTS:
            if unit not in live:
                problem = f"{row[index]}: the weights of unit {unit} are not gathered"
            live.discard(unit)
            held -= unit_bytes[unit]
        if problem:
            raise ScheduleError(schedule, problem, [(rank, index)])
    if live:
        names = ", ".join(map(str, sorted(live)))
        raise ScheduleError(schedule, f"the weights of unit {names} are never freed", [(rank, len(row))])


def _check_scatters(schedule: Schedule, rank: int, row: Sequence[Action], scattered: Collection[int]) -> None:
    """That each of a unit's micro-batches has one, and where it stands, `validate` proves."""
    found = {action.chunk: index for index, action in enumerate(row) if action.kind is Kind.SCATTER_GRADIENTS}
    for unit, index in found.items():
        if unit not in scattered:
            problem = f"{row[index]}: the gradients of unit {unit} are not scattered by micro-batch"
            raise ScheduleError(schedule, problem, [(rank, index)])
    missing = [unit for unit in schedule.chunks_of(rank) if unit in scattered and unit not in found]
    if missing:
        problem = f"rank {rank} lacks {missing[0]}SCATTER0"
        raise ScheduleError(schedule, problem, [(rank, len(row))])


def validate_replicas(schedules: Sequence[Schedule]) -> None:
    """Raises ScheduleError unless all replicas gather, scatter and reduce in the same order on every pipeline rank.

    Args:
        schedules: what each replica executes.
    """
    for replica, schedule in enumerate(schedules):
        for rank in range(schedule.ranks):
            difference = _difference(schedules[0], schedule, rank)
            if difference is not None:
                expected, found, place = difference
                problem = f"replica {replica} comes to {found} where replica 0 comes to {expected}"
                raise ScheduleError(schedule, f"{problem}, and both would wait for ever", [place])


def _difference(first: Schedule, other: Schedule, rank: int) -> tuple[str, str, Place] | None:
    """The first collectives that do not meet, and where that is in the other schedule."""
    rows = first.actions[rank], other.actions[rank]
    ours, theirs = ([(at, each) for at, each in enumerate(row) if each.kind in COLLECTIVES] for row in rows)
    end = (len(rows[1]), "the end")
    for (_, expected), (at, found) in zip_longest(ours, theirs, fillvalue=end):
        if expected != found:
            return str(expected), str(found), (rank, at)
    return None
