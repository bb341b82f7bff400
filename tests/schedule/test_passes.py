"""Passes over schedules: transfers, segments, recomputation, gathered weights and scattered gradients."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action

from megasnn.schedule import Action, ChunkCost, Kind, Schedule, generate, plan_schedule, simulate, validate_schedule
from megasnn.schedule.actions import COMPUTE, PROPAGATING, RECEIVES, SENDS, SHARDING, USES_WEIGHTS
from megasnn.schedule.costs import resident_activations, resident_weights
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.passes import RECOMPUTE, SharedWeights, insert_recompute, insert_transfers, refine

STAGES, MICRO_BATCHES, SEGMENTS = 4, 8, 3
COST = ChunkCost(3, 3, 3, 1, 1)  # whole numbers, so that sums are exact
ONE = ChunkCost(1, 1, 1)
ADDED = SHARDING | {Kind.REDUCE_SCATTER}
ON_LINK = (Kind.UNSHARD, Kind.REDUCE_SCATTER)


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
    validate_schedule(schedule)
    assert " ".join(map(str, schedule.actions[1])) == (
        "1RECV_F0 1F0 1SEND_F0 3RECV_F0 1RECV_F1 1F1 1SEND_F1 3F0 3RECV_F1 3F1"
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_segments_take_as_long_as_their_chunks(name: str) -> None:
    schedule = generate(name, STAGES, MICRO_BATCHES)
    refined = refine(schedule, [SEGMENTS] * schedule.segments)
    validate_schedule(refined)
    segments = [replace(COST, forward=1, input_gradient=1, weight_gradient=1)] * refined.segments
    assert simulate(refined, segments).makespan == simulate(schedule, [COST] * schedule.segments).makespan
    for row, of_chunks in zip(refined.actions, schedule.actions, strict=True):
        computed_segments = sum(action.kind in COMPUTE for action in row)
        computed_chunks = sum(action.kind in COMPUTE for action in of_chunks)
        assert computed_segments == SEGMENTS * computed_chunks


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("mode", RECOMPUTE)
def test_recomputed_forwards_and_their_place(name: str, mode: str) -> None:
    schedule = generate(name, STAGES, MICRO_BATCHES)
    wanted = RECOMPUTE[mode]
    schedule = insert_recompute(
        refine(schedule, [SEGMENTS] * schedule.segments), lambda segment, m: wanted(m, MICRO_BATCHES)
    )
    validate_schedule(schedule)
    for row in schedule.actions:
        computed = [action for action in row if action.kind in COMPUTE]
        for before, action in zip(computed, computed[1:], strict=False):
            segment, kind, m = action
            if kind not in PROPAGATING or before == Action(segment, Kind.FORWARD, m):
                continue  # what was computed right before is still there
            expected = mode == "always" or mode == "except-last" and m != MICRO_BATCHES - 1
            assert (before == Action(segment, Kind.RECOMPUTE, m)) == expected, f"{before} {action}"


def test_time_and_memory_of_recompute_by_hand() -> None:
    """One rank, two segments, two micro-batches: the second segment's forward is followed by its backward."""
    schedule = insert_recompute(refine(generate("1f1b", 1, 2), [2]), lambda segment, m: True)
    row = "0F0 1F0 1B0 0R0 0B0 0F1 1F1 1B1 0R1 0B1 1REDUCE_GRAD 0REDUCE_GRAD"
    assert " ".join(map(str, schedule.actions[0])) == row
    assert simulate(schedule, [ChunkCost(3, 3, 2), ChunkCost(2, 2, 2)]).makespan == 2 * (3 + 5 + 2 + 4 + 3)
    held = resident_activations(schedule, 0, [10, 20], entering=[1, 2])
    assert held == [1, 21, 1, 10, 0, 1, 21, 1, 10, 0, 0, 0]


def of_segments(name: str, stages: int, micro_batches: int, segments: int, recompute: str = "never") -> Schedule:
    wanted = RECOMPUTE[recompute]
    schedule = generate(name, stages, micro_batches)
    refined = refine(schedule, [segments] * schedule.segments)
    return insert_recompute(refined, lambda segment, m: wanted(m, micro_batches))


def gathers(schedule: Schedule) -> list[int]:
    """All-gathers of each rank."""
    return [sum(action.kind is Kind.UNSHARD for action in row) for row in schedule.actions]


def uses(schedule: Schedule) -> list[int]:
    """Computations of each rank with weights: its all-gathers, if weights were freed after each."""
    return [sum(action.kind in USES_WEIGHTS for action in row) for row in schedule.actions]


def row(schedule: Schedule, rank: int = 0) -> str:
    return " ".join(map(str, schedule.actions[rank]))


def test_place_of_gathers_and_frees() -> None:
    """The next segment is gathered while one computes; where forward turns to backward nothing is gathered again."""
    schedule = of_segments("1f1b", 1, 1, 3)
    assert row(SharedWeights((4, 4, 4)).insert(schedule)) == (
        "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 2F0 2B0 "
        "2RESHARD 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD 2REDUCE_GRAD 1REDUCE_GRAD 0REDUCE_GRAD"
    )


def test_weights_stay_gathered_until_their_last_use() -> None:
    schedule = of_segments("1f1b", 1, 2, 3)
    assert row(SharedWeights((4, 4, 4), reshard_after_forward=False).insert(schedule)) == (
        "0UNSHARD 1UNSHARD 0F0 2UNSHARD 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 "
        "2RESHARD 1B1 1RESHARD 0B1 0RESHARD 2REDUCE_GRAD 1REDUCE_GRAD 0REDUCE_GRAD"
    )


def test_sends_go_first() -> None:
    """Sends, then frees and gathers, then the gradients; computations without weights come after a RESHARD."""
    schedule = SharedWeights((1, 1, 0, 1), frozenset({1, 3})).insert(of_segments("zb1p", 2, 1, 2))
    assert row(schedule, 1) == (
        "3UNSHARD 2RECV_F0 2F0 3F0 3I0 3RESHARD 2I0 2SEND_B0 3W0 3REDUCE_SCATTER0 2W0 3REDUCE_GRAD 2REDUCE_GRAD"
    )
    assert row(schedule, 0) == (
        "0UNSHARD 1UNSHARD 0F0 1F0 1SEND_F0 1RECV_B0 1I0 1RESHARD 0I0 0RESHARD 1W0 1REDUCE_SCATTER0 0W0 "
        "1REDUCE_GRAD 0REDUCE_GRAD"
    )


def test_evaluation_gathers_the_next_segment() -> None:
    plan = plan_schedule("1f1b", 2).in_segments([range(3), range(3, 5)], "never")
    assert gathers(plan.sharing(SharedWeights((2,) * 5), []).evaluation(5)) == [15, 2]
    kept = SharedWeights((2,) * 5, reshard_after_forward=False)
    assert gathers(plan.sharing(kept, []).evaluation(5)) == [3, 2]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_the_schedule_it_is_only_added_to(data: st.DataObject) -> None:
    """It is valid. A rank holds the weights of this computation and of the next segment, no more, or gathers once."""
    name = data.draw(st.sampled_from(tuple(SCHEDULES)))
    segments = data.draw(st.integers(1, 4))
    plain = of_segments(
        name,
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 6)),
        segments,
        data.draw(st.sampled_from(list(RECOMPUTE))),
    )
    segment_bytes = tuple(data.draw(st.lists(st.integers(0, 9), min_size=plain.segments, max_size=plain.segments)))
    scattered = data.draw(st.frozensets(st.integers(0, plain.segments - 1)))
    reshards = data.draw(st.booleans())
    schedule = SharedWeights(segment_bytes, scattered, reshard_after_forward=reshards).insert(plain)
    validate_schedule(schedule)
    for rank, actions in enumerate(schedule.actions):
        assert tuple(action for action in actions if action.kind not in ADDED) == plain.actions[rank]
        assert resident_weights(schedule, rank, segment_bytes)[-1] == 0
        if reshards:
            _check_live(actions, segment_bytes)
        else:
            _check_gathered_once(actions, segment_bytes)
    gathered = replace(ONE, unshard=data.draw(st.integers(0, 3)))
    reduced = replace(gathered, reduce_scatter=data.draw(st.integers(0, 3)))
    costs = [reduced if segment in scattered else gathered for segment in range(plain.segments)]
    _check_times(plain, schedule, costs)


def _check_live(actions: tuple[Action, ...], segment_bytes: tuple[int, ...]) -> None:
    live: set[int] = set()
    for index, (segment, kind, _) in enumerate(actions):
        if kind is Kind.UNSHARD:
            live.add(segment)
        elif kind is Kind.RESHARD:
            live.remove(segment)
        elif kind in USES_WEIGHTS and segment_bytes[segment]:
            later = (
                each.segment for each in actions[index:] if each.kind in USES_WEIGHTS and segment_bytes[each.segment]
            )
            assert set(list(dict.fromkeys(later))[:2]) == live


def _check_gathered_once(actions: tuple[Action, ...], segment_bytes: tuple[int, ...]) -> None:
    """Weights are freed before the computation that follows their last use."""
    last_used: int | None = None
    used: set[int] = set()
    freed: set[int] = set()
    for segment, kind, _ in actions:
        if kind is Kind.RESHARD:
            assert segment == last_used
            freed.add(segment)
        elif kind in USES_WEIGHTS and segment_bytes[segment]:
            assert segment not in freed
            last_used = segment
            used.add(segment)
    assert freed == used
    assert sum(action.kind is Kind.UNSHARD for action in actions) == len(used)


def _check_times(plain: Schedule, shared: Schedule, costs: list[ChunkCost]) -> None:
    """Nothing computes without its weights, and neither computations nor messages overlap on a rank."""
    alone = simulate(plain, [ONE] * len(costs))
    result = simulate(shared, costs)
    assert result.busy == alone.busy and result.peak_activations == alone.peak_activations
    moved = [(timed.end - timed.start) for row in result.timeline for timed in row if timed.action.kind in ON_LINK]
    assert result.makespan >= alone.makespan and (any(moved) or result.makespan == alone.makespan)
    for row in result.timeline:
        for kinds in (ON_LINK, COMPUTE):
            done = [timed for timed in row if timed.action.kind in kinds]
            assert all(before.end <= after.start for before, after in zip(done, done[1:], strict=False))
        there = {action.segment: 0.0 for action, *_ in row}
        for action, start, end in row:
            if action.kind is Kind.UNSHARD:
                there[action.segment] = end
            assert action.kind not in USES_WEIGHTS or start >= there[action.segment]


def test_replicas_with_other_numbers_of_micro_batches_are_refused() -> None:
    plan = plan_schedule("1f1b", 2)
    plan.sharing(SharedWeights((2, 2)), [4, 4])
    with pytest.raises(ValueError, match="3 and 4 micro-batches .*--global-batch-size"):
        plan.sharing(SharedWeights((2, 2)), [4, 3])


def test_a_computation_waits_for_its_weights_and_they_for_the_link() -> None:
    """One rank, two segments of 10 and 20; forwards take 4, backwards 6; the gather of segment 0 takes 3, of segment 1
    5."""
    schedule = SharedWeights((10, 20), frozenset({0, 1})).insert(of_segments("1f1b", 1, 1, 2))
    result = simulate(
        schedule, [ChunkCost(4, 3, 3, unshard=3, reduce_scatter=1), ChunkCost(4, 3, 3, unshard=5, reduce_scatter=2)]
    )
    assert [(str(action), start, end) for action, start, end in result.timeline[0]] == [
        ("0UNSHARD", 0, 3),
        ("1UNSHARD", 3, 8),
        ("0F0", 3, 7),
        ("1F0", 8, 12),
        ("1B0", 12, 18),
        ("1RESHARD", 18, 18),
        ("1REDUCE_SCATTER0", 18, 20),
        ("0B0", 18, 24),
        ("0RESHARD", 24, 24),
        ("0REDUCE_SCATTER0", 24, 25),
        ("1REDUCE_GRAD", 24, 24),
        ("0REDUCE_GRAD", 24, 24),
    ]
    assert result.makespan == 25 and result.busy == (20,) and result.idle == (5,)
    assert resident_weights(schedule, 0, (10, 20)) == [10, 30, 30, 30, 30, 10, 10, 10, 0, 0, 0, 0]


def test_gathers_ahead_take_no_time() -> None:
    """Nothing but the first gather of a step is waited for where the link keeps up."""
    schedule = of_segments("zb1p", 4, 8, 4)
    costs = [ChunkCost(1, 1, 1, unshard=0.75)] * schedule.segments
    without = simulate(schedule, costs).makespan
    assert simulate(SharedWeights((1,) * schedule.segments).insert(schedule), costs).makespan == without + 0.75


def test_planning_is_cheap() -> None:
    """64 chunks of 4 segments, 128 micro-batches, on one rank, on 32 and on 64."""
    for name, stages, chunks in (("interleaved", 1, 64), ("zbv", 32, 2), ("1f1b", 64, 1)):
        schedule = refine(generate(name, stages, 128, chunks), [4] * 64)
        start = time.process_time()
        planned = SharedWeights((1,) * 256, frozenset(range(256))).insert(schedule)
        assert time.process_time() - start < 2
        assert sum(gathers(planned)) < sum(uses(planned)) and sum(uses(planned)) >= 2 * 256 * 128
