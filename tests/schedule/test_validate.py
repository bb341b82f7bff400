"""The validator against single faults that it must see, and against a naive run of arbitrarily disordered
schedules."""

from collections import defaultdict, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.schedule import Action, Kind, Schedule, ScheduleError, generate, plan_schedule, validate
from megasnn.schedule.actions import SENDS
from megasnn.schedule.passes import insert_gradient_sync, insert_transfers


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


def parsed(*rows: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(Action.parse(text) for text in row.split()) for row in rows)


def with_row(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(row)
    return replace(schedule, actions=tuple(rows))


@settings(max_examples=50, deadline=None)
@given(schedules, st.data())
def test_a_lost_action_is_seen(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = list(schedule.actions[rank])
    lost = row.pop(data.draw(st.integers(0, len(row) - 1)))
    with pytest.raises(ScheduleError, match=rf"lacks {lost}\b"):
        validate(with_row(schedule, rank, row))


@settings(max_examples=50, deadline=None)
@given(schedules, st.data())
def test_a_repeated_action_is_seen(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = list(schedule.actions[rank])
    again = data.draw(st.sampled_from(row))
    with pytest.raises(ScheduleError, match=rf"{again} is there twice"):
        validate(with_row(schedule, rank, [*row, again]))


@settings(max_examples=50, deadline=None)
@given(schedules, st.data())
def test_a_foreign_action_is_seen(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = list(schedule.actions[rank])
    at = data.draw(st.integers(0, len(row) - 1))
    foreign = Action(row[at].chunk, Kind.FORWARD, schedule.micro_batches)
    with pytest.raises(ScheduleError, match=rf"{foreign} does not belong here \(rank {rank} at action {at}\)"):
        validate(with_row(schedule, rank, [*row[:at], foreign, *row[at + 1 :]]))


def runs(schedule: Schedule) -> bool:
    """Whether a naive executor gets through: tagged messages in queues, and every use of something absent
    is fatal."""
    done: list[set[Action]] = [set() for _ in schedule.actions]
    queues: dict[tuple[int, int, bool], deque[Action]] = defaultdict(deque)
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.actions):
            if at[rank] == len(order):
                continue
            action = order[at[rank]]
            if action.kind.is_receive:
                queue = queues[schedule.placement[action.peer.chunk], rank, action.kind is Kind.RECV_FORWARD]
                if not queue:
                    continue
                if queue.popleft() != action.peer:
                    return False
            elif action.kind in SENDS:
                if Action(action.chunk, Kind(action.kind.value[-1]), action.micro_batch) not in done[rank]:
                    return False
                peer = schedule.placement[action.peer.chunk]
                queues[rank, peer, action.kind is Kind.SEND_FORWARD].append(action)
            elif not ready(schedule, action, done[rank]):
                return False
            done[rank].add(action)
            at[rank] += 1
            moved = True
    return all(at[rank] == len(order) for rank, order in enumerate(schedule.actions))


def ready(schedule: Schedule, action: Action, done: set[Action]) -> bool:
    """For one chunk per rank."""
    chunk, m = action.chunk, action.micro_batch
    backwards = [a.micro_batch for a in done if a.kind is Kind.BACKWARD]
    if action.kind is Kind.SYNC_GRADIENTS:
        return len(backwards) == schedule.micro_batches
    if action.kind is Kind.FORWARD:
        forwards = [a for a in done if a.kind is Kind.FORWARD]
        return len(forwards) == m and (chunk == 0 or Action(chunk, Kind.RECV_FORWARD, m) in done)
    has_gradient = chunk == schedule.chunks - 1 or Action(chunk, Kind.RECV_BACKWARD, m) in done
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
        validate(schedule)
    except ScheduleError:
        assert not runs(schedule)
    else:
        assert runs(schedule)


def test_a_deadlock_shows_who_waits_where() -> None:
    schedule = Schedule(
        "crossed", (0, 1), 1, parsed("0RECV_B0 0F0 0SEND_F0 0B0 0SYNC", "1RECV_F0 1F0 1B0 1SEND_B0 1SYNC")
    )
    with pytest.raises(ScheduleError) as error:
        validate(schedule)
    text = str(error.value)
    assert "deadlock" in text
    assert "rank 0: >0RECV_B0< 0F0 0SEND_F0" in text
    assert "rank 1: >1RECV_F0< 1F0" in text


def test_a_receive_out_of_turn_is_seen() -> None:
    schedule = Schedule(
        "turn",
        (0, 1),
        2,
        parsed("0F0 0F1 0SEND_F1 0SEND_F0", "1RECV_F0 1F0 1RECV_F1 1F1"),
        forward_only=True,
    )
    with pytest.raises(ScheduleError, match="1RECV_F0 is next to receive from rank 0, which sends 0SEND_F1 first"):
        validate(schedule)


def test_a_placement_that_leaves_a_rank_without_work_is_refused() -> None:
    schedule = Schedule("idle", (0,), 1, parsed("0F0 0B0 0SYNC", ""))
    with pytest.raises(ScheduleError, match=r"placement \(0,\)"):
        validate(schedule)


def test_the_grid_is_cut_to_the_surroundings_of_the_mark() -> None:
    schedule = generate("1f1b", 2, 64)
    row = list(schedule.actions[1])
    row[100], row[101] = row[101], row[100]
    with pytest.raises(ScheduleError) as error:
        validate(with_row(schedule, 1, row))
    grid = str(error.value).splitlines()[1:]
    assert len(grid) == 2 and all("..." in line and len(line) < 250 for line in grid)
    assert grid[1].count(">") == 1


@pytest.mark.parametrize(
    ("placement", "rows"),
    [
        # Two chunks a rank, in a loop and as a V; in a V the last two chunks' neighbours share a rank.
        ((0, 1, 0, 1), ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")),
        ((0, 1, 1, 0), ("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1")),
    ],
)
def test_several_chunks_on_a_rank(placement: tuple[int, ...], rows: tuple[str, str]) -> None:
    schedule = insert_gradient_sync(insert_transfers(Schedule("by hand", placement, 2, parsed(*rows))))
    validate(schedule)
    for rank, order in enumerate(schedule.actions):
        assert [a for a in order if a.kind is Kind.SYNC_GRADIENTS] == [
            Action(chunk, Kind.SYNC_GRADIENTS) for chunk in reversed(schedule.chunks_of(rank))
        ]
    local = {(a, b) for a, b in zip(range(3), range(1, 4), strict=True) if placement[a] == placement[b]}
    sent = {(a.chunk, a.peer.chunk) for order in schedule.actions for a in order if a.kind is Kind.SEND_FORWARD}
    assert sent == {(0, 1), (1, 2), (2, 3)} - local
