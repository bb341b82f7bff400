"""What a rank needs at each of its computations, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from megasnn.schedule import Action, Kind, generate
from megasnn.schedule.arrivals import known_arrivals
from megasnn.schedule.memory import UnitMemory, moments
from megasnn.schedule.refine import insert_recompute, refine

WORKING = {Kind.FORWARD: 5.0, Kind.BACKWARD: 7.0, Kind.INPUT_GRADIENT: 6.0, Kind.WEIGHT_GRADIENT: 4.0}
UNIT = UnitMemory(100, 10, {**WORKING, Kind.RECOMPUTE: 3.0}, 1.0, deferred=60, output=40, message=2, gradient=20)


def _told(name: str, rank: int, micro_batches: int) -> dict[str, tuple[float, float, float]]:
    """On two stages."""
    found = moments(generate(name, 2, micro_batches), rank, [UNIT, UNIT])
    return {str(action): numbers for action, *numbers in map(tuple, found) for numbers in [tuple(numbers)]}


def test_messages_are_there_until_they_are_known_to_have_arrived() -> None:
    """1F1B with three micro-batches on two stages: 0F0 0F1 0B0 0F2 0B1 0B2, and 1F0 1B0 1F1 1B1 1F2 1B2."""
    first = _told("1f1b", 0, 3)
    assert first["0F0"] == (0, 5, 0)
    assert first["0F1"] == (100, 5, 2 + 20), "the first message, and room for the gradient that comes next"
    assert first["0B0"] == (200, 7, 2), "the gradient itself is in what it needs; the first message has arrived"
    last = _told("1f1b", 1, 3)
    assert last["1B0"] == (100, 7, 2), "room for the next message"
    assert last["1F1"] == (0, 5, 20), "a gradient on its way"
    assert last["1B1"] == (100, 7, 20 + 2)
    assert last["1B2"] == (100, 7, 20), "the first one has arrived: the third message was sent behind it"


def test_a_backward_in_two_parts_leaves_less() -> None:
    last = _told("zb1p", 1, 2)
    assert last["1I0"] == (100, 6, 2)
    assert last["1F1"][0] == 60 and last["1W1"][0] == 60


def test_what_waits_between_units_and_for_a_forward_that_is_computed_again() -> None:
    schedule = insert_recompute(refine(generate("gpipe", 1, 2), [2]), lambda unit, m: True)
    found = {str(action): numbers for action, *numbers in moments(schedule, 0, [UNIT, UNIT])}
    assert found["0F0"] == [10, 5, 0] and found["1F0"] == [20, 5, 0]
    assert found["1R0"] == [40, 3, 0]
    assert found["0R0"] == [30, 3, 40], "the gradient of what it gives waits"


def test_who_sends_something_has_received_what_it_was_to_receive_before() -> None:
    schedule = generate("1f1b", 2, 3)
    receives = [Action.parse(f"0RECV_B{m}") for m in range(3)]
    assert [known_arrivals(schedule, 0)[each] for each in receives] == [1, 2, 3]
    receives = [Action.parse(f"1RECV_F{m}") for m in range(3)]
    assert [known_arrivals(schedule, 1)[each] for each in receives] == [0, 0, 1]


class _NotRead(tuple[Action, ...]):
    """The actions of a rank that nobody has to look at."""

    def __iter__(self) -> Iterator[Action]:
        raise AssertionError("actions of a rank that exchanges nothing with this one")


def test_only_ranks_that_exchange_tensors_are_looked_at() -> None:
    """Otherwise what all ranks need takes the square of their number."""
    schedule = generate("zbv", 8, 4)
    for rank in range(8):
        near = {rank - 1, rank, rank + 1}
        rows = tuple(row if other in near else _NotRead(row) for other, row in enumerate(schedule.actions))
        assert known_arrivals(replace(schedule, actions=rows), rank) == known_arrivals(schedule, rank)


class _Bytes(float):
    """A number that counts how often it is added to others."""

    added = 0

    def __radd__(self, other: float) -> float:
        _Bytes.added += 1
        return other + float(self)

    def __rsub__(self, other: float) -> float:
        _Bytes.added += 1
        return other - float(self)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv"])
def test_what_has_arrived_is_not_added_up_again(name: str) -> None:
    """Twice the micro-batches are twice the work, however many messages are on their way."""

    def additions(micro_batches: int) -> int:
        unit = replace(UNIT, message=_Bytes(2), gradient=_Bytes(20))
        _Bytes.added = 0
        schedule = generate(name, 4, micro_batches)
        for rank in range(4):
            list(moments(schedule, rank, [unit] * schedule.chunks))
        return _Bytes.added

    assert 0 < additions(64) < 2.2 * additions(32) + 100
