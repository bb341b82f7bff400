"""When weights that ranks share by rows are gathered and freed, and gradients scattered to the owners of the rows.

Passes over a complete schedule, of units. The order in which a rank uses weights is known, so what gives way is what is
used furthest in the future: there is no way with fewer gathers (L. A. Belady, IBM Systems Journal 5, 1966).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from megasnn.schedule.actions import FINISHING, GATHERING, SENDS, USES_WEIGHTS, Action, Kind, Schedule
from megasnn.schedule.memory import weights_held
from megasnn.schedule.validate_weights import validate_weights

AT_ONCE = 2  # gathers on their way: of the unit that computes next, and of the one behind it


@dataclass(frozen=True)
class SharedWeights:
    """What is gathered, and how much of it at once.

    Attributes:
        unit_bytes: what the gathered weights of each unit take; 0: it has none.
        limit, ahead: see `insert_gathers`.
        scattered: the units whose gradients are scattered after every micro-batch.
        travelling: the bytes of a buffer that each unit can be gathered in.
    """

    unit_bytes: tuple[int, ...]
    limit: int | None = None
    ahead: int = 1
    scattered: frozenset[int] = frozenset()
    travelling: tuple[int, ...] = ()

    def insert(self, schedule: Schedule) -> Schedule:
        """The schedule with gathers, frees and scatters, proved right. Raises ValueError for a limit too small."""
        scattered = schedule if schedule.forward_only else insert_scatters(schedule, self.scattered)
        complete = insert_gathers(scattered, self.unit_bytes, self.limit, self.ahead)
        validate_weights(complete, self.unit_bytes, self.limit_of(schedule), self.scattered)
        return complete

    def limit_of(self, schedule: Schedule) -> int:
        """The most bytes of gathered weights that a rank may hold."""
        return default_limit(schedule, self.unit_bytes, self.ahead) if self.limit is None else self.limit

    def whole(self, schedule: Schedule) -> int:
        """Bytes of all weights of the rank that has the most: with this limit each unit is gathered once."""
        return max(sum(self.unit_bytes[unit] for unit in schedule.chunks_of(rank)) for rank in range(schedule.ranks))

    def gathered_and_buffers(self, schedule: Schedule, rank: int) -> tuple[int, int]:
        """The most bytes of gathered weights that a rank holds, and what the buffers take in which they come."""
        units = [self.travelling[unit] for unit in schedule.chunks_of(rank) if self.unit_bytes[unit]]
        return max(weights_held(schedule, rank, self.unit_bytes)), max(units, default=0) * min(AT_ONCE, len(units))


def insert_gathers(schedule: Schedule, unit_bytes: Sequence[int], limit: int | None = None, ahead: int = 1) -> Schedule:
    """Adds a GATHER before computations that use a unit's weights and do not find them, and a FREE behind the last one
    that does.

    While a unit computes, the `ahead` units that are used next are gathered, the nearest first, as far as the limit
    allows. Among all plans that do so, this one has the fewest gathers if all units are equally large.

    Args:
        unit_bytes: what the gathered weights of each unit take; 0: it has none, and no action.
        limit: the most bytes of gathered weights on a rank, those on their way included; see `default_limit`.
    Raises:
        ValueError: the limit is less than a unit takes; another number of units.
    """
    _check(schedule, unit_bytes, limit, ahead)
    if limit is None:
        limit = default_limit(schedule, unit_bytes, ahead)
    rows = tuple(_with_gathers(row, unit_bytes, limit, ahead) for row in schedule.actions)
    return replace(schedule, actions=rows)


def default_limit(schedule: Schedule, unit_bytes: Sequence[int], ahead: int = 1) -> int:
    """The least bytes with which a unit can always compute while the `ahead` next ones are gathered, on any rank."""
    return max(
        (
            sum(unit_bytes[unit] for _, unit in upcoming[: ahead + 1])
            for row in schedule.actions
            for upcoming in _upcoming([unit for _, unit in _uses(row, unit_bytes)])
        ),
        default=0,
    )


def _check(schedule: Schedule, unit_bytes: Sequence[int], limit: int | None, ahead: int) -> None:
    if len(unit_bytes) != schedule.chunks or min(unit_bytes) < 0:
        raise ValueError(f"weights of {list(unit_bytes)} bytes for {schedule.chunks} units: each needs 0 or more")
    if ahead < 0:
        raise ValueError(f"weights are gathered {ahead} units ahead; it must be 0 or more")
    if limit is not None and limit < max(unit_bytes):
        unit = max(range(len(unit_bytes)), key=unit_bytes.__getitem__)
        least = f"the least is {unit_bytes[unit]}"
        raise ValueError(f"a limit of {limit} bytes of gathered weights is too small for unit {unit}; {least}")


def _uses(row: Sequence[Action], unit_bytes: Sequence[int]) -> list[tuple[int, int]]:
    """Where weights are used, as (index, unit)."""
    return [(at, unit) for at, (unit, kind, _) in enumerate(row) if kind in USES_WEIGHTS and unit_bytes[unit]]


def _upcoming(used: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """At each use, the next use of every unit that is used again, as (number of the use, unit), the nearest first.

    Args:
        used: the units, in the order of their uses.
    """
    following = _next_uses(used)
    first = {unit: number for number, unit in reversed(list(enumerate(used)))}
    upcoming = sorted((number, unit) for unit, number in first.items())
    for number, unit in enumerate(used):
        yield upcoming
        upcoming.pop(0)
        if following[number] < len(used):
            insort(upcoming, (following[number], unit))


def _next_uses(used: Sequence[int]) -> list[int]:
    """For each use, the number of the next one of the same unit; behind the last one, that of all uses."""
    following, later = [0] * len(used), dict[int, int]()
    for number in range(len(used) - 1, -1, -1):
        following[number] = later.get(used[number], len(used))
        later[used[number]] = number
    return following


def _with_gathers(row: Sequence[Action], unit_bytes: Sequence[int], limit: int, ahead: int) -> tuple[Action, ...]:
    uses = _uses(row, unit_bytes)
    if not uses:
        return tuple(row)
    gathered, freed = _plan([unit for _, unit in uses], unit_bytes, limit, ahead)
    result = [Action(unit, Kind.GATHER_WEIGHTS) for unit in gathered[0]]
    start = 0
    for (at, _), gone, coming in zip(uses, freed, [*gathered[1:], []], strict=True):
        end = at + 1
        while end < len(row) and row[end].kind in SENDS:  # others wait for what is sent
            end += 1
        result += row[start:end]
        result += [Action(unit, Kind.FREE_WEIGHTS) for unit in gone]
        result += [Action(unit, Kind.GATHER_WEIGHTS) for unit in coming]
        start = end
    return (*result, *row[start:])


def _plan(
    used: Sequence[int], unit_bytes: Sequence[int], limit: int, ahead: int
) -> tuple[list[list[int]], list[list[int]]]:
    """For each use, the units that are gathered right before it, and those that are freed right behind it.

    Args:
        used: the units, in the order of their uses.
    """
    following, room = _next_uses(used), limit
    gathered: list[list[int]] = [[] for _ in used]
    freed: list[list[int]] = [[] for _ in used]
    last: dict[int, int] = {}  # of the units that are live: the number of the last use so far
    furthest: list[tuple[int, int, int]] = []  # heap of (-next use, unit, last use); some entries are of the past
    for number, (unit, upcoming) in enumerate(zip(used, _upcoming(used), strict=True)):
        gathered[number] = [each for each in _fitting(upcoming[: ahead + 1], unit_bytes, limit) if each not in last]
        room -= sum(unit_bytes[each] for each in gathered[number])
        while room < 0:
            _, gone, its_last = heappop(furthest)
            if last.get(gone) == its_last:
                freed[last.pop(gone)].append(gone)
                room += unit_bytes[gone]
        last |= dict.fromkeys(gathered[number], number)
        if following[number] < len(used):
            last[unit] = number
            heappush(furthest, (-following[number], unit, number))
        else:
            del last[unit]
            freed[number].append(unit)
            room += unit_bytes[unit]
    return gathered, freed


def _fitting(upcoming: Sequence[tuple[int, int]], unit_bytes: Sequence[int], limit: int) -> Iterator[int]:
    for _, unit in upcoming:
        limit -= unit_bytes[unit]
        if limit < 0:
            return
        yield unit


def insert_scatters(schedule: Schedule, units: Collection[int]) -> Schedule:
    """Adds a SCATTER behind each B or W of these units."""
    rows = tuple(_with_scatters(row, frozenset(units)) for row in schedule.actions)
    return replace(schedule, actions=rows)


def _with_scatters(row: Sequence[Action], units: Collection[int]) -> tuple[Action, ...]:
    result: list[Action] = []
    due: Action | None = None
    for action in row:
        if due is not None and action.kind not in SENDS | GATHERING:  # others wait for what is sent and gathered
            result.append(due)
            due = None
        result.append(action)
        if action.kind in FINISHING and action.chunk in units:
            due = Action(action.chunk, Kind.SCATTER_GRADIENTS, action.micro_batch)
    return (*result, *([] if due is None else [due]))
