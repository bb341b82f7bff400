import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.schedule import ChunkCost, Kind, Transfer, generate, plan_schedule, simulate
from megasnn.schedule.actions import COMPUTE, USES_WEIGHTS
from megasnn.schedule.fsdp_passes import SharedWeights
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.passes import insert_recompute, refine


def test_a_transfer_delays_the_receiver_only() -> None:
    result = simulate(generate("gpipe", 2, 1), [ChunkCost(1, 2, transfer=10), ChunkCost(1, 2)])
    # F 0-1, transfer 1-11, F 11-12, B 12-14, transfer 14-24, B 24-26.
    assert result.makespan == 26
    assert [(str(t.action), t.start, t.end) for t in result.timeline[0]] == [
        ("0F0", 0, 1),
        ("0SEND_F0", 1, 1),
        ("0RECV_B0", 1, 24),
        ("0B0", 24, 26),
        ("0REDUCE_GRAD", 26, 26),
    ]


def test_a_receive_is_posted_before_it_is_needed() -> None:
    """The last stage computes for 4 while the next tensor, sent at 2, is on its way for 3: it does not wait."""
    costs = [ChunkCost(1, 2, transfer=3), ChunkCost(4, 2)]
    result = simulate(plan_schedule("1f1b", 2).evaluation(3), costs)
    assert [(t.start, t.end) for t in result.timeline[1] if t.action.kind is Kind.FORWARD] == [
        (4, 8),
        (8, 12),
        (12, 16),
    ]


def test_a_receive_is_not_posted_before_the_computation_before_it() -> None:
    """The second tensor was sent at 2, and the last stage computes from 6 to 9: it is on its way from 7 on, when the
    backward begins behind which it is received."""
    result = simulate(generate("1f1b", 2, 3), [ChunkCost(1, 2, transfer=5), ChunkCost(1, 2)])
    times = {str(timed.action): (timed.start, timed.end) for timed in result.timeline[1]}
    assert (times["1F0"], times["1B0"], times["1F1"]) == ((6, 7), (7, 9), (12, 13))


def test_units_of_a_chunk_are_one_computation_for_what_is_received_behind_them() -> None:
    """As above, where the second unit of the backward begins at 8."""
    schedule, units = refine(generate("1f1b", 2, 3), [2, 2]), [ChunkCost(0.5, 1, transfer=5)] * 4
    for wholes, start in (([0, 0, 1, 1], 12), (None, 13)):
        timeline = simulate(schedule, units, wholes).timeline[1]
        assert next(timed.start for timed in timeline if str(timed.action) == "2F1") == start


def test_packing_holds_up_the_sender_and_unpacking_the_receiver() -> None:
    way_up, way_down = Transfer(2, send=0.5, receive=0.25), Transfer(4, send=0.125)
    costs = [ChunkCost(1, 2, output=way_up, gradient=way_down), ChunkCost(1, 2)]
    result = simulate(generate("gpipe", 2, 1), costs)
    # F 0-1, packing -1.5, on the way -3.5, unpacking -3.75, F -4.75, B -6.75, packing -6.875, on the way -10.875.
    assert [(str(t.action), t.end) for t in result.timeline[1]][:4] == [
        ("1RECV_F0", 3.75),
        ("1F0", 4.75),
        ("1B0", 6.75),
        ("1SEND_B0", 6.875),
    ]
    assert result.timeline[0][1].end == 1.5
    assert result.makespan == 12.875
    assert result.busy == (3, 3)


def test_transfers_on_a_link_follow_each_other() -> None:
    result = simulate(plan_schedule("1f1b", 2).evaluation(3), [ChunkCost(1, 2, transfer=5), ChunkCost(1, 2)])
    arrivals = [t.end for t in result.timeline[1] if t.action.kind.is_receive]
    # The second receive is posted when the first is over, and its transfer runs while the first is computed.
    assert arrivals == [6, 11, 16]
    assert result.makespan == 17
    assert result.peak_activations == (1, 1)


def test_costs_say_what_activations_count_and_must_fit() -> None:
    result = simulate(generate("gpipe", 2, 3), [ChunkCost(1, 2, activation=0.5), ChunkCost(1, 2, activation=2)])
    assert result.peak_activations == (1.5, 6)
    with pytest.raises(ValueError, match="2 costs for 1 chunks"):
        simulate(generate("1f1b", 1, 1), [ChunkCost(1, 1)] * 2)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(tuple(SCHEDULES)),
    st.integers(2, 6),
    st.integers(0, 2),
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_gathers_of_any_schedule(name: str, limit: int, ahead: int, scattered: bool, gather: int, scatter: int) -> None:
    schedule = generate(name, 2, 4)
    schedule = insert_recompute(refine(schedule, [2] * schedule.chunks), lambda unit, m: m < 3)
    units = range(schedule.chunks)
    shared = SharedWeights((1,) * len(units), limit, ahead, frozenset(units if scattered else ())).insert(schedule)
    alone = simulate(schedule, [ChunkCost(1, 2)] * len(units))
    result = simulate(shared, [ChunkCost(1, 2, unshard=gather, reduce_scatter=scatter)] * len(units))
    assert result.busy == alone.busy and result.peak_activations == alone.peak_activations
    assert result.makespan >= alone.makespan
    if gather == 0 and (scatter == 0 or not scattered):
        assert result.makespan == alone.makespan
    for row in result.timeline:
        on_link = [t for t in row if t.action.kind in (Kind.UNSHARD, Kind.REDUCE_SCATTER)]
        computed = [t for t in row if t.action.kind in COMPUTE]
        for timed in (on_link, computed):
            assert all(before.end <= after.start for before, after in zip(timed, timed[1:], strict=False))
        there: dict[int, float] = {}
        for action, start, end in row:
            if action.kind is Kind.UNSHARD:
                there[action.chunk] = end
            elif action.kind in USES_WEIGHTS:
                assert start >= there[action.chunk]
