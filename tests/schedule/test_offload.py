"""Inputs that are moved to the host's memory and back: where the actions stand, what is refused, memory and time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megasnn.schedule import Action, ChunkCost, Kind, Schedule, generate, simulate, validate
from megasnn.schedule.actions import COMPUTE, MOVES
from megasnn.schedule.memory import UnitMemory, moments
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.offload import insert_offload, most_on_host
from megasnn.schedule.refine import insert_recompute, refine
from megasnn.schedule.validate import ScheduleError


def _offloaded(name: str, stages: int = 4, micro_batches: int = 8, units: int = 3) -> Schedule:
    schedule = generate(name, stages, micro_batches)
    refined = refine(schedule, [units] * schedule.chunks)
    return insert_offload(insert_recompute(refined, lambda unit, m: True))


def test_by_hand() -> None:
    row = [str(action) for action in _offloaded("gpipe", 1, 1, 4).actions[0]]
    # The last unit's forward is followed by its backward; too little lies between those of the third.
    assert row == "0F0 1F0 1OUT0 2F0 3F0 3B0 2R0 1IN0 2B0 1R0 1B0 0R0 0B0 3SYNC 2SYNC 1SYNC 0SYNC".split()


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_valid_and_moves_between_computations(name: str) -> None:
    schedule = _offloaded(name)
    validate(schedule)
    for row in schedule.actions:
        moved = [action for action in row if action.kind is Kind.OFFLOAD]
        assert moved and not any(action.chunk == 0 for action in moved)
        for out in moved:
            at, back = row.index(out), row.index(out._replace(kind=Kind.FETCH))
            assert row[at - 1] == out._replace(kind=Kind.FORWARD)
            assert any(action.kind in COMPUTE for action in row[at:back])
            again = row.index(out._replace(kind=Kind.RECOMPUTE))
            assert sum(action.kind in COMPUTE for action in row[back:again]) == 1


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("wrong", ["missing", "twice", "of what is not kept", "out of order"])
def test_what_is_wrong_is_refused_with_the_place(wrong: str, seed: int) -> None:
    """A move that is missing, twice, too early, too late or of what is not kept."""
    draw = random.Random(f"{wrong} {seed}")
    schedule = _offloaded(draw.choice([*SCHEDULES]), 2, 4, 2)
    rank = draw.choice([each for each, row in enumerate(schedule.actions) if any(a.kind in MOVES for a in row)])
    row = [*schedule.actions[rank]]
    move = draw.choice([action for action in row if action.kind in MOVES])
    if wrong == "missing":
        row.remove(move)
    elif wrong == "twice":
        row.insert(draw.randrange(len(row)), move)
    elif wrong == "of what is not kept":
        row.remove(move._replace(kind=Kind.RECOMPUTE))
    else:
        row.remove(move)
        first, last = move._replace(kind=Kind.FORWARD), move._replace(kind=Kind.RECOMPUTE)
        row.insert(row.index(first) if move.kind is Kind.OFFLOAD else row.index(last) + 1, move)
    broken = replace(schedule, actions=tuple(tuple(row) if r == rank else a for r, a in enumerate(schedule.actions)))
    with pytest.raises(ScheduleError, match=rf"\d(OUT|IN)\d .*\(rank {rank} at action \d+\)|needs .*\(rank {rank}"):
        validate(broken)


def test_time_and_memory() -> None:
    schedule = _offloaded("gpipe", 1, 1, 4)
    costs = [ChunkCost(1.0, 2.0, moved=0.5)] * 4
    plain = replace(schedule, actions=tuple(tuple(a for a in row if a.kind not in MOVES) for row in schedule.actions))
    assert simulate(schedule, costs).makespan == simulate(plain, costs).makespan, "it travels beside a backward"
    slow = [replace(each, moved=3.0) for each in costs]
    # OUT ends at 5; IN, begun at 7, ends at 10, where the backward beside it ends at 9.
    assert simulate(schedule, slow).makespan == simulate(plain, slow).makespan + 1.0
    unit = UnitMemory(100, 10, dict.fromkeys(COMPUTE, 1.0), 1.0, message=8)
    kept = {str(each.action): each.kept for each in moments(schedule, 0, [unit] * 4)}
    before = {str(each.action): each.kept for each in moments(plain, 0, [unit] * 4)}
    assert {action: before[action] - kept[action] for action in kept if before[action] != kept[action]} == {
        "2F0": 8, "3F0": 8, "3B0": 8, "2R0": 8,
    }  # fmt: skip
    assert most_on_host(schedule, 0, [unit] * 4) == 8 and most_on_host(plain, 0, [unit] * 4) == 0


def test_notation() -> None:
    assert [Action.parse(text) for text in ("3OUT2", "3IN2")] == [Action(3, Kind.OFFLOAD, 2), Action(3, Kind.FETCH, 2)]
    assert Action.parse("3I2") == Action(3, Kind.INPUT_GRADIENT, 2)
