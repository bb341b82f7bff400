"""Single faults in schedules with gathers, frees, scatters and recompute: each is refused, with the place."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from megasnn.schedule import Action, Kind, Schedule, ScheduleError, generate, validate
from megasnn.schedule.actions import FINISHING, PROPAGATING, USES_WEIGHTS
from megasnn.schedule.refine import insert_recompute, refine
from megasnn.schedule.validate_weights import validate_replicas, validate_weights
from megasnn.schedule.weights import SharedWeights

NAMES = ("1f1b", "zb1p", "zbv", "interleaved")
LIMIT, EACH = 2, 5  # live units; mutants of each kind and schedule
Row = list[Action]


@dataclass(frozen=True)
class Mutant:
    """A row with one fault. problem: what must be said of it; at: the place in the row that must be named."""

    row: Row
    problem: str
    at: int


def complete(name: str) -> Schedule:
    """Three units in each of two stages' chunks; all but the last micro-batch are computed again."""
    schedule = generate(name, 2, 4)
    refined = insert_recompute(refine(schedule, [3] * schedule.chunks), lambda unit, m: m < 3)
    units = range(refined.chunks)
    return SharedWeights((1,) * refined.chunks, LIMIT, scattered=frozenset(units)).insert(refined)


def prove(schedule: Schedule, replica: Schedule) -> None:
    validate(schedule)
    units = range(schedule.chunks)
    validate_weights(schedule, [1] * schedule.chunks, LIMIT, units)
    validate_replicas([replica, schedule])


def places(row: Row, kind: Kind) -> list[int]:
    return [at for at, action in enumerate(row) if action.kind is kind]


def without(row: Row, at: int) -> Row:
    return [*row[:at], *row[at + 1 :]]


def use_behind(row: Row, at: int) -> int:
    """Where the weights that are gathered there are first used."""
    return next(n for n in range(at, len(row)) if row[n].chunk == row[at].chunk and row[n].kind in USES_WEIGHTS)


def last_use(row: Row, at: int) -> int:
    """The same for the last use before they are freed."""
    return max(n for n in range(at) if row[n].chunk == row[at].chunk and row[n].kind in USES_WEIGHTS)


def gather_missing(row: Row) -> Iterator[Mutant]:
    for at in places(row, Kind.GATHER_WEIGHTS):
        use = use_behind(row, at)
        unit = row[at].chunk
        yield Mutant(without(row, at), f"{row[use]} needs the weights of unit {unit}, which are not gathered", use - 1)


def gathered_too_late(row: Row) -> Iterator[Mutant]:
    for at in places(row, Kind.GATHER_WEIGHTS):
        use = use_behind(row, at)
        late = [*without(row, at)[:use], row[at], *row[use + 1 :]]
        yield Mutant(late, f"{row[use]} needs the weights of unit {row[at].chunk}, which are not gathered", use - 1)


def gathered_twice(row: Row) -> Iterator[Mutant]:
    for at in places(row, Kind.GATHER_WEIGHTS):
        use = use_behind(row, at)
        mutant = [*row[:use], row[at], *row[use:]]
        yield Mutant(mutant, f"{row[at]}: the weights of unit {row[at].chunk} are gathered already", use)


def freed_too_early(row: Row) -> Iterator[Mutant]:
    for at in places(row, Kind.FREE_WEIGHTS):
        use = last_use(row, at)
        early = [*row[:use], row[at], *without(row, at)[use:]]
        yield Mutant(early, f"{row[use]} needs the weights of unit {row[at].chunk}, which are not gathered", use + 1)


def freed_twice(row: Row) -> Iterator[Mutant]:
    for at in places(row, Kind.FREE_WEIGHTS):
        mutant = [*row[: at + 1], row[at], *row[at + 1 :]]
        yield Mutant(mutant, f"{row[at]}: the weights of unit {row[at].chunk} are not gathered", at + 1)


def never_freed(row: Row) -> Iterator[Mutant]:
    """A FREE is missing behind which nothing is gathered for which it would make room."""
    last = max(places(row, Kind.GATHER_WEIGHTS))
    for at in (at for at in places(row, Kind.FREE_WEIGHTS) if at > last):
        yield Mutant(without(row, at), f"the weights of unit {row[at].chunk} are never freed", len(row) - 1)


def more_than_the_limit(row: Row) -> Iterator[Mutant]:
    """Something is freed behind the gather that its bytes are for."""
    for at in places(row, Kind.FREE_WEIGHTS):
        if row[at + 1].kind is Kind.GATHER_WEIGHTS and row[at - 1].kind is not Kind.FREE_WEIGHTS:
            swapped = [*row[:at], row[at + 1], row[at], *row[at + 2 :]]
            yield Mutant(swapped, f"{row[at + 1]}: 3 bytes of gathered weights where the limit is 2", at)


def scatter_missing(row: Row) -> Iterator[Mutant]:
    for at in places(row, Kind.SCATTER_GRADIENTS):
        yield Mutant(without(row, at), f"lacks {row[at]}", len(row) - 1)


def scattered_twice(row: Row) -> Iterator[Mutant]:
    for at in places(row, Kind.SCATTER_GRADIENTS):
        yield Mutant([*row, row[at]], f"{row[at]} is there twice", len(row))


def scattered_too_early(row: Row) -> Iterator[Mutant]:
    for at in places(row, Kind.SCATTER_GRADIENTS):
        leaves = next(n for n in range(at) if row[n].kind in FINISHING and row[n][::2] == row[at][::2])
        mutant = [*row[:leaves], row[at], *without(row, at)[leaves:]]
        yield Mutant(mutant, f"{row[at]} needs {row[leaves]} before it", leaves)


def scattered_too_late(row: Row) -> Iterator[Mutant]:
    """Behind the next micro-batch's gradient, or behind SYNC."""
    for at in places(row, Kind.SCATTER_GRADIENTS):
        unit = row[at].chunk
        ends = FINISHING | {Kind.SYNC_GRADIENTS}
        adds = next(n for n in range(at, len(row)) if row[n].chunk == unit and row[n].kind in ends)
        mutant = [*without(row, at)[:adds], row[at], *row[adds + 1 :]]
        yield Mutant(mutant, f"{row[adds]} needs {row[at]} before it", adds - 1)


def again_after_its_backward(row: Row) -> Iterator[Mutant]:
    for at in places(row, Kind.RECOMPUTE):
        back = next(n for n in range(at, len(row)) if row[n].kind in PROPAGATING and row[n][::2] == row[at][::2])
        mutant = [*without(row, at)[:back], row[at], *row[back + 1 :]]
        yield Mutant(mutant, f"{row[back]} needs {row[at]} before it", back - 1)


def again_twice(row: Row) -> Iterator[Mutant]:
    for at in places(row, Kind.RECOMPUTE):
        yield Mutant([*row[: at + 1], row[at], *row[at + 1 :]], f"{row[at]} is there twice", at + 1)


def other_order(row: Row) -> Iterator[Mutant]:
    """Two gathers that follow each other, the other way round: right by itself, but not with another replica."""
    for at in places(row, Kind.GATHER_WEIGHTS):
        if row[at + 1].kind is Kind.GATHER_WEIGHTS:
            swapped = [*row[:at], row[at + 1], row[at], *row[at + 2 :]]
            yield Mutant(swapped, f"replica 1 comes to {row[at + 1]} where replica 0 comes to {row[at]}", at)


def later_than_others(row: Row) -> Iterator[Mutant]:
    """A gradient is scattered before a gather that others begin with."""
    for at in places(row, Kind.GATHER_WEIGHTS):
        if row[at + 1].kind is Kind.SCATTER_GRADIENTS:
            swapped = [*row[:at], row[at + 1], row[at], *row[at + 2 :]]
            yield Mutant(swapped, f"replica 1 comes to {row[at + 1]} where replica 0 comes to {row[at]}", at)


MUTATIONS: list[Callable[[Row], Iterator[Mutant]]] = [
    *(
        gather_missing,
        gathered_too_late,
        gathered_twice,
        freed_too_early,
        freed_twice,
        never_freed,
        more_than_the_limit,
    ),
    *(scatter_missing, scattered_twice, scattered_too_early, scattered_too_late, again_after_its_backward, again_twice),
    *(other_order, later_than_others),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mutate", MUTATIONS)
def test_mutations_are_refused(name: str, mutate: Callable[[Row], Iterator[Mutant]]) -> None:
    schedule, draw = complete(name), random.Random(f"{name} {mutate.__name__}")
    prove(schedule, schedule)
    mutants = [(rank, each) for rank, row in enumerate(schedule.actions) for each in mutate(list(row))]
    chosen = draw.sample(mutants, min(EACH, len(mutants)))
    for rank, mutant in chosen:
        actions = list(schedule.actions)
        actions[rank] = tuple(mutant.row)
        with pytest.raises(ScheduleError, match=re.escape(mutant.problem)) as error:
            prove(replace(schedule, actions=tuple(actions)), schedule)
        assert f"(rank {rank} at action {mutant.at})" in str(error.value)


def test_there_are_more_than_200() -> None:
    found = {
        (name, mutate.__name__): sum(len(list(mutate(list(row)))) for row in complete(name).actions)
        for name in NAMES
        for mutate in MUTATIONS
    }
    assert sum(min(EACH, count) for count in found.values()) >= 200
    for mutate in MUTATIONS:
        assert any(found[name, mutate.__name__] for name in NAMES), mutate.__name__


def test_what_has_no_weights_is_not_gathered_and_what_is_not_scattered_has_no_scatter() -> None:
    schedule = complete("1f1b")
    with pytest.raises(ScheduleError, match=r"0GATHER: unit 0 has no weights \(rank 0 at action 0\)"):
        validate_weights(schedule, [0, *[1] * (schedule.chunks - 1)])
    with pytest.raises(ScheduleError, match=r"0SCATTER\d: the gradients of unit 0 are not scattered by micro-batch"):
        validate_weights(schedule, [1] * schedule.chunks, scattered=range(1, schedule.chunks))


def test_a_unit_without_a_single_scatter_is_seen() -> None:
    schedule = complete("1f1b")
    rows = tuple(tuple(each for each in row if "0SCATTER" not in str(each)) for row in schedule.actions)
    bare = replace(schedule, actions=rows)
    validate(bare)
    with pytest.raises(ScheduleError, match=rf"rank 0 lacks 0SCATTER0 \(rank 0 at action {len(rows[0])}\)"):
        validate_weights(bare, [1] * schedule.chunks, scattered=range(schedule.chunks))


def test_a_replica_that_ends_before_the_others_is_seen() -> None:
    longer, shorter = (SharedWeights((1,) * 4).insert(refine(generate("1f1b", 1, count), [4])) for count in (3, 2))
    with pytest.raises(ScheduleError, match="replica 1 comes to 3SYNC where replica 0 comes to 2GATHER"):
        validate_replicas([longer, shorter])
