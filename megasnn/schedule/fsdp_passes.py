"""Passes for weights that replicas shard by rows: when units are gathered and freed, and gradients reduce-scattered.

They take a complete schedule of units. The order in which a rank uses weights is known, so the weights freed first are
those
used furthest in the future: no plan has fewer gathers (L. A. Belady, IBM Systems Journal 5, 1966).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from megasnn.schedule.actions import FINISHING, SENDS, SHARDING, USES_WEIGHTS, Action, Kind, Schedule
from megasnn.schedule.memory import weights_held
from megasnn.schedule.validate import validate_weights

AT_ONCE = 2  # gathers on their way: of the unit that computes next, and of the one behind it


@dataclass(frozen=True)
class SharedWeights:
    """Weights to gather, and how much of them at once.

    Attributes:
        unit_bytes: of the gathered weights of each unit; 0: it has none.
        limit, ahead: see `insert_unshards`.
        scattered: units whose gradients are scattered after every micro-batch.
        travelling: bytes of a buffer that each unit can be gathered in.
    """

    unit_bytes: tuple[int, ...]
    limit: int | None = None
    ahead: int = 1
    scattered: frozenset[int] = frozenset()
    travelling: tuple[int, ...] = ()

    def insert(self, schedule: Schedule) -> Schedule:
        """Adds UNSHARD, RESHARD and REDUCE_SCATTER, proved right. Raises ValueError for a limit too small."""
        scattered = schedule if schedule.forward_only else insert_reduce_scatters(schedule, self.scattered)
        complete = insert_unshards(scattered, self.unit_bytes, self.limit, self.ahead)
        limit = default_limit(schedule, self.unit_bytes, self.ahead) if self.limit is None else self.limit
        validate_weights(complete, self.unit_bytes, limit, self.scattered)
        return complete

    def whole(self, schedule: Schedule) -> int:
        """Bytes of all weights of the rank that has the most: with this limit each unit is gathered once."""
        return max(sum(self.unit_bytes[unit] for unit in schedule.chunks_of(rank)) for rank in range(schedule.ranks))

    def gathered_and_buffers(self, schedule: Schedule, rank: int) -> tuple[int, int]:
        """Most bytes of gathered weights that a rank holds, and bytes of the buffers in which they come."""
        units = [self.travelling[unit] for unit in schedule.chunks_of(rank) if self.unit_bytes[unit]]
        return max(weights_held(schedule, rank, self.unit_bytes)), max(units, default=0) * min(AT_ONCE, len(units))


def insert_unshards(
    schedule: Schedule, unit_bytes: Sequence[int], limit: int | None = None, ahead: int = 1
) -> Schedule:
    """Adds an UNSHARD before computations that do not find their unit's weights, and a RESHARD behind the last use.

    While a unit computes, the `ahead` units that are used next are gathered, the nearest first, as far as the limit
    allows. Among all plans that do so, this one has the fewest gathers if all units are equally large.

    Args:
        unit_bytes: of the gathered weights of each unit; 0: it has none, and no action.
        limit: most bytes of gathered weights on a rank, those on their way included; None: `default_limit`.
    Raises:
        ValueError: the limit is less than a unit takes; another number of units.
    """
    if len(unit_bytes) != schedule.chunks or min(unit_bytes) < 0:
        raise ValueError(f"weights of {list(unit_bytes)} bytes for {schedule.chunks} units: each needs 0 or more")
    if ahead < 0:
        raise ValueError(f"weights are gathered {ahead} units ahead; it must be 0 or more")
    if limit is None:
        limit = default_limit(schedule, unit_bytes, ahead)
    if limit < max(unit_bytes):
        unit = max(range(len(unit_bytes)), key=unit_bytes.__getitem__)
        least = f"the least is {unit_bytes[unit]}"
        raise ValueError(f"a limit of {limit} bytes of gathered weights is too small for unit {unit}; {least}")
    rows = tuple(_with_unshards(row, unit_bytes, limit, ahead) for row in schedule.actions)
    return replace(schedule, actions=rows)


def default_limit(schedule: Schedule, unit_bytes: Sequence[int], ahead: int = 1) -> int:
    """Least bytes with which a unit can always compute while the `ahead` next ones are gathered, on any rank."""
    most = 0
    for row in schedule.actions:
        used = [unit for _, unit in _uses(row, unit_bytes)]
        for number in range(len(used)):
            most = max(most, sum(unit_bytes[unit] for unit in _next_units(used, number, ahead + 1)))
    return most


def _uses(row: Sequence[Action], unit_bytes: Sequence[int]) -> list[tuple[int, int]]:
    """Uses of weights, as (index, unit)."""
    return [(at, unit) for at, (unit, kind, _) in enumerate(row) if kind in USES_WEIGHTS and unit_bytes[unit]]


def _next_units(used: Sequence[int], number: int, count: int) -> list[int]:
    """First `count` different units that are used from a use on, the nearest first."""
    found: dict[int, None] = {}
    for at in range(number, len(used)):
        found[used[at]] = None
        if len(found) == count:
            break
    return list(found)


def _next_uses(used: Sequence[int]) -> list[int]:
    """Number of the next use of the same unit, for each use; behind the last one, that of all uses."""
    following, later = [0] * len(used), dict[int, int]()
    for number in range(len(used) - 1, -1, -1):
        following[number] = later.get(used[number], len(used))
        later[used[number]] = number
    return following


def _with_unshards(row: Sequence[Action], unit_bytes: Sequence[int], limit: int, ahead: int) -> tuple[Action, ...]:
    uses = _uses(row, unit_bytes)
    if not uses:
        return tuple(row)
    gathered, freed = _plan([unit for _, unit in uses], unit_bytes, limit, ahead)
    result = [Action(unit, Kind.UNSHARD) for unit in gathered[0]]
    start = 0
    for (at, _), gone, coming in zip(uses, freed, [*gathered[1:], []], strict=True):
        end = at + 1
        while end < len(row) and row[end].kind in SENDS:  # others wait for what is sent
            end += 1
        result += row[start:end]
        result += [Action(unit, Kind.RESHARD) for unit in gone]
        result += [Action(unit, Kind.UNSHARD) for unit in coming]
        start = end
    return (*result, *row[start:])


def _plan(
    used: Sequence[int], unit_bytes: Sequence[int], limit: int, ahead: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Units that are gathered right before each use, and those that are freed right behind it.

    Args:
        used: units, in the order of their uses.
    """
    following, room = _next_uses(used), limit
    gathered: list[list[int]] = []
    freed: list[list[int]] = [[] for _ in used]
    live: dict[int, tuple[int, int]] = {}  # (next use, last use) of each unit; no next use: not to be freed unused
    for number, unit in enumerate(used):
        wanted = _fitting(_next_units(used, number, ahead + 1), unit_bytes, limit)
        gathered.append([each for each in wanted if each not in live])
        room -= sum(unit_bytes[each] for each in gathered[number])
        while room < 0:
            gone = max(live, key=live.__getitem__)
            freed[live.pop(gone)[1]].append(gone)
            room += unit_bytes[gone]
        live |= dict.fromkeys(gathered[number], (-1, number))
        live[unit] = following[number], number
        if following[number] == len(used):
            del live[unit]
            freed[number].append(unit)
            room += unit_bytes[unit]
    return gathered, freed


def _fitting(units: Sequence[int], unit_bytes: Sequence[int], limit: int) -> Iterator[int]:
    for unit in units:
        limit -= unit_bytes[unit]
        if limit < 0:
            return
        yield unit


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
        if action.kind in FINISHING and action.chunk in units:
            due = Action(action.chunk, Kind.REDUCE_SCATTER, action.micro_batch)
    return (*result, *([] if due is None else [due]))
