"""Schedules of units, and forwards that are computed again in them: what stays, what it costs, what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megasnn.schedule import Action, ChunkCost, Kind, Schedule, ScheduleError, generate, simulate, validate
from megasnn.schedule.actions import COMPUTE, PROPAGATING
from megasnn.schedule.memory import activations_held
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.refine import RECOMPUTE, insert_recompute, refine

STAGES, MICRO_BATCHES, UNITS = 4, 8, 3
COST = ChunkCost(3, 6, transfer=1)  # whole numbers, so that sums are exact


def of_units(name: str) -> tuple[Schedule, Schedule]:
    """A named schedule of chunks, and the same of three units each."""
    schedule = generate(name, STAGES, MICRO_BATCHES)
    return schedule, refine(schedule, [UNITS] * schedule.chunks)


def again(name: str, mode: str) -> Schedule:
    """Of units, with the forwards of a mode of --recompute computed again."""
    wanted = RECOMPUTE[mode]
    return insert_recompute(of_units(name)[1], lambda unit, m: wanted(m, MICRO_BATCHES))


@pytest.mark.parametrize("name", SCHEDULES)
def test_units_take_as_long_as_their_chunks(name: str) -> None:
    schedule, refined = of_units(name)
    validate(refined)
    units = [replace(COST, forward=1, backward=2)] * refined.chunks
    assert simulate(refined, units).makespan == simulate(schedule, [COST] * schedule.chunks).makespan
    for rank, row in enumerate(refined.actions):
        computed = [action for action in row if action.kind in COMPUTE]
        assert len(computed) == UNITS * sum(action.kind in COMPUTE for action in schedule.actions[rank])


def test_a_chunk_needs_a_unit() -> None:
    schedule = generate("1f1b", 2, 3)
    for units in ([1, 0], [2], [1, 1, 1]):
        with pytest.raises(ValueError, match="units for 2 chunks: each needs one or more"):
            refine(schedule, units)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("mode", RECOMPUTE)
def test_what_is_computed_again_and_when(name: str, mode: str) -> None:
    schedule = again(name, mode)
    validate(schedule)
    for row in schedule.actions:
        computed = [action for action in row if action.kind in COMPUTE]
        for before, action in zip(computed, computed[1:], strict=False):
            unit, kind, m = action
            if kind not in PROPAGATING or before == Action(unit, Kind.FORWARD, m):
                continue  # what was computed right before is still there
            wanted = mode == "always" or mode == "except-last" and m != MICRO_BATCHES - 1
            assert (before == Action(unit, Kind.RECOMPUTE, m)) == wanted, f"{before} {action}"


def test_time_and_memory_by_hand() -> None:
    """One rank, two units, two micro-batches: the second unit's forward is followed by its backward."""
    schedule = insert_recompute(refine(generate("1f1b", 1, 2), [2]), lambda unit, m: True)
    assert " ".join(map(str, schedule.actions[0])) == "0F0 1F0 1B0 0R0 0B0 0F1 1F1 1B1 0R1 0B1 1SYNC 0SYNC"
    assert simulate(schedule, [ChunkCost(3, 5), ChunkCost(2, 4)]).makespan == 2 * (3 + 5 + 2 + 4 + 3)
    held = activations_held(schedule, 0, [10, 20], entering=[1, 2])
    assert held == [1, 21, 1, 10, 0, 1, 21, 1, 10, 0, 0, 0]


def _moved(row: list[Action], action: Action, other: Action, behind: bool) -> list[Action]:
    """The row with an action right before another one, or right behind it."""
    rest = [each for each in row if each != action]
    at = rest.index(other) + behind
    return [*rest[:at], action, *rest[at:]]


@pytest.mark.parametrize("name", SCHEDULES)
def test_mutations_are_refused(name: str) -> None:
    """An R after its backward, one before its forward, and one that is there twice: 25 of them, with the place."""
    schedule, draw = again(name, "always"), random.Random(1)
    places = [(rank, each) for rank, row in enumerate(schedule.actions) for each in row if each.kind is Kind.RECOMPUTE]
    for rank, repeated in draw.sample(places, 25):
        row = list(schedule.actions[rank])
        unit, _, m = repeated
        (backward,) = (each for each in row if each.kind in PROPAGATING and each[::2] == (unit, m))
        forward = Action(unit, Kind.FORWARD, m)
        mutants = {
            rf"{backward} needs {repeated} before it": _moved(row, repeated, backward, behind=True),
            rf"{repeated} needs {forward} before it": _moved(row, repeated, forward, behind=False),
            rf"{repeated} is there twice": [*row, repeated],
        }
        for problem, mutant in mutants.items():
            actions = (*schedule.actions[:rank], tuple(mutant), *schedule.actions[rank + 1 :])
            with pytest.raises(ScheduleError, match=rf"{problem} \(rank {rank} at action \d+\)"):
                validate(replace(schedule, actions=actions))
