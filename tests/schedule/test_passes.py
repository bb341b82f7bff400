"""Actions, transfers, units, and forwards that are computed again: what stays, what it costs, where it stands."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from torch.distributed.pipelining.schedules import _Action

from megasnn.schedule import Action, ChunkCost, Kind, Schedule, generate, simulate, validate
from megasnn.schedule.actions import COMPUTE, PROPAGATING, RECEIVES, SENDS
from megasnn.schedule.memory import activations_held
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.passes import RECOMPUTE, insert_recompute, insert_transfers, refine

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


def test_transfers_know_their_other_end() -> None:
    for kind in Kind:
        action = Action(3, kind, 7)
        if kind in SENDS | RECEIVES:
            assert action.peer.peer == action and (action.peer.kind in SENDS) != (kind in SENDS)
        else:
            with pytest.raises(ValueError, match=str(action)):
                _ = action.peer


def test_the_notation_is_that_of_torch_pipelining() -> None:
    for text in ("2F0", "1B3", "1I3", "1W3", "0SEND_F2", "2RECV_F1", "1SEND_B0", "2RECV_B1", "3UNSHARD", "3RESHARD"):
        ((action,),) = parsed(text)
        assert str(_Action.from_str(text)) == str(action) == text
    assert str(Action(0, Kind.REDUCE_GRAD)) == "0REDUCE_GRAD"


def test_receives_wait_for_their_turn_on_a_shared_link() -> None:
    rows = parsed("0F0 2F0 0F1 2F1", "1F0 1F1 3F0 3F1")
    schedule = insert_transfers(Schedule("loop", (0, 1, 0, 1), 2, rows, forward_only=True))
    validate(schedule)
    assert " ".join(map(str, schedule.actions[1])) == (
        "1RECV_F0 1F0 1SEND_F0 3RECV_F0 1RECV_F1 1F1 1SEND_F1 3F0 3RECV_F1 3F1"
    )


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
