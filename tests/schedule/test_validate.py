"""The validator sees single faults, and agrees with a naive run about disordered schedules."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.schedule import Action, Kind, Schedule, ScheduleError, generate, plan_schedule, validate_schedule
from megasnn.schedule.actions import FINISHING, PROPAGATING, RECEIVES, SENDS, USES_WEIGHTS
from megasnn.schedule.passes import SharedWeights, complete, insert_recompute, refine
from megasnn.schedule.validate import validate_weights
from tests.schedule.test_passes import parsed

Row = list[Action]
# Schedules with gathered weights and recomputed forwards, in which single faults are planted.
MUTATED = ("1f1b", "zb1p", "zbv", "interleaved")
EACH = 5  # mutants of each kind and schedule


def of_name(name: str, stages: int, micro_batches: int, forward_only: bool) -> Schedule:
    plan = plan_schedule(name, stages)
    return plan.evaluation(micro_batches) if forward_only else plan.training(micro_batches)


schedules = st.builds(
    of_name,
    st.sampled_from(["gpipe", "1f1b"]),
    stages=st.integers(1, 4),
    micro_batches=st.integers(1, 5),
    forward_only=st.booleans(),
)


def with_row(schedule: Schedule, rank: int, row: Row) -> Schedule:
    return replace(schedule, actions=(*schedule.actions[:rank], tuple(row), *schedule.actions[rank + 1 :]))


@settings(max_examples=100, deadline=None)
@given(schedules, st.data())
def test_an_action_that_is_lost_repeated_or_foreign_is_seen(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = list(schedule.actions[rank])
    at = data.draw(st.integers(0, len(row) - 1))
    foreign = Action(row[at].segment, Kind.FORWARD, schedule.micro_batches)
    for mutant, named in (
        ([*row[:at], *row[at + 1 :]], f"rank {rank} at action"),
        ([*row, row[at]], str(row[at])),
        ([*row[:at], foreign, *row[at + 1 :]], rf"{foreign} .*rank {rank} at action {at}"),
    ):
        with pytest.raises(ScheduleError, match=named):
            validate_schedule(with_row(schedule, rank, mutant))


def runs(schedule: Schedule) -> bool:
    """Whether a naive executor finishes: it queues tagged messages, and fails where anything it needs is absent."""
    done: list[set[Action]] = [set() for _ in schedule.actions]
    queues: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.actions):
            if at[rank] == len(order):
                continue
            action = order[at[rank]]
            if action.kind in RECEIVES:
                queue = queues[schedule.placement[action.peer.segment], rank]
                if not queue:
                    continue
                if queue.popleft() != action.peer:
                    return False
            elif action.kind in SENDS:
                if Action(action.segment, Kind(action.kind.value[-1]), action.micro_batch) not in done[rank]:
                    return False
                queues[rank, schedule.placement[action.peer.segment]].append(action)
            elif not ready(schedule, action, done[rank]):
                return False
            done[rank].add(action)
            at[rank] += 1
            moved = True
    return all(at[rank] == len(order) for rank, order in enumerate(schedule.actions))


def ready(schedule: Schedule, action: Action, done: set[Action]) -> bool:
    """For one chunk per rank."""
    chunk, m = action.segment, action.micro_batch
    backwards = [a.micro_batch for a in done if a.kind is Kind.BACKWARD]
    if action.kind is Kind.REDUCE_GRAD:
        return len(backwards) == schedule.micro_batches
    if action.kind is Kind.FORWARD:
        forwards = [a for a in done if a.kind is Kind.FORWARD]
        return len(forwards) == m and (chunk == 0 or Action(chunk, Kind.RECV_FORWARD, m) in done)
    has_gradient = chunk == schedule.segments - 1 or Action(chunk, Kind.RECV_BACKWARD, m) in done
    return has_gradient and Action(chunk, Kind.FORWARD, m) in done and len(backwards) == m


@settings(max_examples=400, deadline=None)
@given(schedules, st.data())
def test_a_disordered_schedule_is_valid_exactly_if_a_naive_run_gets_through(
    schedule: Schedule, data: st.DataObject
) -> None:
    for _ in range(data.draw(st.integers(0, 3))):
        rank = data.draw(st.integers(0, schedule.ranks - 1))
        row = list(schedule.actions[rank])
        a, b = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
        row[a], row[b] = row[b], row[a]
        schedule = with_row(schedule, rank, row)
    try:
        validate_schedule(schedule)
    except ScheduleError:
        assert not runs(schedule)
    else:
        assert runs(schedule)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("0F0 0W0 0I0", "0W0 .*0I0"),
        ("0F0 0I0", "0W0"),
        ("0F0 0I0 0B0 0W0", "0B0"),
        ("0F0 0F1 0I0 0I1 0W1 0W0", "0W1 .*0W0"),
        ("0F0 0F1 0I1 0I0 0W0 0W1", "0I1 .*0I0"),
    ],
)
def test_a_wrong_split_is_seen(row: str, named: str) -> None:
    (actions,) = parsed(row)
    micro_batches = 1 + max(action.micro_batch or 0 for action in actions)
    with pytest.raises(ScheduleError, match=named):
        validate_schedule(complete(Schedule("wrong", (0,), micro_batches, (actions,))))


def test_a_deadlock_shows_where_each_rank_waits() -> None:
    rows = "0RECV_B0 0F0 0SEND_F0 0B0 0REDUCE_GRAD", "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD"
    with pytest.raises(ScheduleError) as error:
        validate_schedule(Schedule("crossed", (0, 1), 1, parsed(*rows)))
    text = str(error.value)
    assert "deadlock" in text
    assert "rank 0: >0RECV_B0< 0F0 0SEND_F0" in text and "rank 1: >1RECV_F0< 1F0" in text


def test_a_receive_out_of_turn_and_an_idle_rank_are_seen() -> None:
    rows = parsed("0F0 0F1 0SEND_F1 0SEND_F0", "1RECV_F0 1F0 1RECV_F1 1F1")
    with pytest.raises(ScheduleError, match="1RECV_F0 .* rank 0, .* 0SEND_F1"):
        validate_schedule(Schedule("turn", (0, 1), 2, rows, forward_only=True))
    with pytest.raises(ScheduleError, match=r"placement \(0,\)"):
        validate_schedule(Schedule("idle", (0,), 1, parsed("0F0 0B0 0REDUCE_GRAD", "")))


def shared(name: str) -> Schedule:
    """Two stages, three segments per chunk; all but the last micro-batch are recomputed."""
    schedule = generate(name, 2, 4)
    refined = insert_recompute(refine(schedule, [3] * schedule.segments), lambda segment, m: m < 3)
    return SharedWeights((1,) * refined.segments, frozenset(range(refined.segments))).insert(refined)


def prove(schedule: Schedule) -> None:
    validate_schedule(schedule)
    validate_weights(schedule, [1] * schedule.segments, range(schedule.segments))


def lost(row: Row, at: int) -> Row:
    return [*row[:at], *row[at + 1 :]]


def twice(row: Row, at: int) -> Row:
    return [*row[: at + 1], row[at], *row[at + 1 :]]


def behind(row: Row, at: int, ends: Callable[[Action], bool]) -> Row | None:
    """Moves an action right behind the next one of its segment that `ends` accepts; None if there is none."""
    for end in range(at + 1, len(row)):
        if row[end].segment == row[at].segment and ends(row[end]):
            return [*lost(row, at)[:end], row[at], *row[end + 1 :]]
    return None


def before(row: Row, at: int, begins: Callable[[Action], bool]) -> Row:
    """Moves an action right before the last one of its segment that `begins` accepts."""
    begin = max(n for n in range(at) if row[n].segment == row[at].segment and begins(row[n]))
    return [*row[:begin], row[at], *lost(row, at)[begin:]]


def mutants(row: Row) -> Iterator[tuple[str, Row | None]]:
    """(kind of fault, row with one such fault)."""
    for at, action in enumerate(row):
        kind, m = action.kind, action.micro_batch
        if kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_SCATTER):
            yield f"{kind.value} lost", lost(row, at)
            yield f"{kind.value} twice", twice(row, at)
        if kind is Kind.UNSHARD:
            yield "gathered too late", behind(row, at, lambda each: each.kind in USES_WEIGHTS)
        elif kind is Kind.RESHARD:
            yield "freed too early", before(row, at, lambda each: each.kind in USES_WEIGHTS)
        elif kind is Kind.REDUCE_SCATTER:
            yield "scattered too late", behind(row, at, lambda each: each.kind in FINISHING | {Kind.REDUCE_GRAD})
            yield "scattered too early", before(row, at, lambda each, m=m: each.kind in FINISHING and each[2] == m)
        elif kind is Kind.RECOMPUTE:
            yield "again twice", twice(row, at)
            yield "again too late", behind(row, at, lambda each, m=m: each.kind in PROPAGATING and each[2] == m)
            yield "again too early", before(row, at, lambda each, m=m: each.kind is Kind.FORWARD and each[2] == m)


@pytest.mark.parametrize("name", MUTATED)
def test_single_faults_are_seen(name: str) -> None:
    schedule = shared(name)
    draw = random.Random(name)
    prove(schedule)
    found: dict[str, list[tuple[int, Row]]] = defaultdict(list)
    for rank, row in enumerate(schedule.actions):
        for fault, mutant in mutants(list(row)):
            if mutant is not None:
                found[fault].append((rank, mutant))
    assert len(found) >= 13
    for fault, rows in found.items():
        for rank, row in draw.sample(rows, min(EACH, len(rows))):
            try:
                prove(with_row(schedule, rank, row))
            except ScheduleError as error:
                assert f"rank {rank} at action" in str(error)
            else:
                pytest.fail(f"{fault} is not seen: {' '.join(map(str, row))}")


def test_segments_without_weights_or_scattered_gradients() -> None:
    schedule = shared("1f1b")
    with pytest.raises(ScheduleError, match=r"0UNSHARD .*rank 0 at action 0"):
        validate_weights(schedule, [0, *[1] * (schedule.segments - 1)])
    with pytest.raises(ScheduleError, match=r"0REDUCE_SCATTER\d"):
        validate_weights(schedule, [1] * schedule.segments, scattered=range(1, schedule.segments))
    rows = []
    for row in schedule.actions:
        rows.append(tuple(each for each in row if (each.segment, each.kind) != (0, Kind.REDUCE_SCATTER)))
    bare = replace(schedule, actions=tuple(rows))
    validate_schedule(bare)
    with pytest.raises(ScheduleError, match=rf"rank 0 lacks 0REDUCE_SCATTER \(rank 0 at action {len(rows[0])}\)"):
        validate_weights(bare, [1] * schedule.segments, scattered=range(schedule.segments))
