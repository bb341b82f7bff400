"""Transfers, units, and forwards that are computed again: what stays, what it costs, where it stands."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megasnn.schedule import Action, ChunkCost, Kind, Schedule, generate, simulate, validate
from megasnn.schedule.actions import COMPUTE, PROPAGATING
from megasnn.schedule.memory import activations_held
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.passes import RECOMPUTE, complete, insert_recompute, insert_transfers, refine

STAGES, MICRO_BATCHES, UNITS = 4, 8, 3
COST = ChunkCost(3, 3, 3, 1, 1)  # whole numbers, so that sums are exact


def parsed(*rows: str) -> tuple[tuple[Action, ...], ...]:
    """Actions of each rank, as they print."""
    return tuple(tuple(_parsed(text) for text in row.split()) for row in rows)


def _parsed(text: str) -> Action:
    parts = re.fullmatch(r"(\d+)([A-Z_]+)(\d*)", text)
    assert parts is not None
    chunk, kind, micro_batch = parts.groups()
    return Action(int(chunk), Kind(kind), int(micro_batch) if micro_batch else None)


def test_receives_wait_for_their_turn_on_a_shared_link() -> None:
    rows = parsed("0F0 2F0 0F1 2F1", "1F0 1F1 3F0 3F1")
    schedule = insert_transfers(Schedule("loop", (0, 1, 0, 1), 2, rows, forward_only=True))
    validate(schedule)
    assert " ".join(map(str, schedule.actions[1])) == (
        "1RECV_F0 1F0 1SEND_F0 3RECV_F0 1RECV_F1 1F1 1SEND_F1 3F0 3RECV_F1 3F1"
    )


@pytest.mark.parametrize(
    ("placement", "rows"),
    [
        # Two chunks a rank, in a loop and as a V; in a V the last two chunks' neighbours share a rank.
        ((0, 1, 0, 1), ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")),
        ((0, 1, 1, 0), ("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1")),
    ],
)
def test_several_chunks_on_a_rank(placement: tuple[int, ...], rows: tuple[str, str]) -> None:
    schedule = complete(Schedule("by hand", placement, 2, parsed(*rows)))
    validate(schedule)
    for rank, order in enumerate(schedule.actions):
        reduced = [action.unit for action in order if action.kind is Kind.REDUCE_GRAD]
        assert reduced == list(reversed(schedule.units_of(rank)))
    local = {(a, a + 1) for a in range(3) if placement[a] == placement[a + 1]}
    sent = {(a.unit, a.peer.unit) for order in schedule.actions for a in order if a.kind is Kind.SEND_FORWARD}
    assert sent == {(0, 1), (1, 2), (2, 3)} - local


@pytest.mark.parametrize("name", SCHEDULES)
def test_units_take_as_long_as_their_chunks(name: str) -> None:
    schedule = generate(name, STAGES, MICRO_BATCHES)
    refined = refine(schedule, [UNITS] * schedule.units)
    validate(refined)
    units = [replace(COST, forward=1, input_gradient=1, weight_gradient=1)] * refined.units
    assert simulate(refined, units).makespan == simulate(schedule, [COST] * schedule.units).makespan
    for row, of_chunks in zip(refined.actions, schedule.actions, strict=True):
        counts = [sum(action.kind in COMPUTE for action in each) for each in (row, of_chunks)]
        assert counts[0] == UNITS * counts[1]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("mode", RECOMPUTE)
def test_what_is_computed_again_and_when(name: str, mode: str) -> None:
    schedule = generate(name, STAGES, MICRO_BATCHES)
    wanted = RECOMPUTE[mode]
    schedule = insert_recompute(refine(schedule, [UNITS] * schedule.units), lambda unit, m: wanted(m, MICRO_BATCHES))
    validate(schedule)
    for row in schedule.actions:
        computed = [action for action in row if action.kind in COMPUTE]
        for before, action in zip(computed, computed[1:], strict=False):
            unit, kind, m = action
            if kind not in PROPAGATING or before == Action(unit, Kind.FORWARD, m):
                continue  # what was computed right before is still there
            expected = mode == "always" or mode == "except-last" and m != MICRO_BATCHES - 1
            assert (before == Action(unit, Kind.RECOMPUTE, m)) == expected, f"{before} {action}"


def test_time_and_memory_of_recompute_by_hand() -> None:
    """One rank, two units, two micro-batches: the second unit's forward is followed by its backward."""
    schedule = insert_recompute(refine(generate("1f1b", 1, 2), [2]), lambda unit, m: True)
    row = "0F0 1F0 1B0 0R0 0B0 0F1 1F1 1B1 0R1 0B1 1REDUCE_GRAD 0REDUCE_GRAD"
    assert " ".join(map(str, schedule.actions[0])) == row
    assert simulate(schedule, [ChunkCost(3, 3, 2), ChunkCost(2, 2, 2)]).makespan == 2 * (3 + 5 + 2 + 4 + 3)
    held = activations_held(schedule, 0, [10, 20], entering=[1, 2])
    assert held == [1, 21, 1, 10, 0, 1, 21, 1, 10, 0, 0, 0]
