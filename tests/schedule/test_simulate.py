import pytest

from megasnn.schedule import ChunkCost, generate, simulate


def test_a_transfer_delays_the_receiver_only() -> None:
    result = simulate(generate("gpipe", 2, 1), [ChunkCost(1, 1, 1, 10, 10), ChunkCost(1, 1, 1)])
    # F 0-1, transfer 1-11, F 11-12, B 12-14, transfer 14-24, B 24-26.
    assert result.makespan == 26
    assert [(str(t.action), t.start, t.end) for t in result.timeline[0]] == [
        ("0F0", 0, 1),
        ("0SEND_F0", 1, 1),
        ("0RECV_B0", 1, 24),
        ("0B0", 24, 26),
        ("0REDUCE_GRAD", 26, 26),
    ]


def test_messages_travel_at_the_same_time_whatever_their_ranks_compute() -> None:
    """They are sent at 1, 2 and 3, and take 5; back they take 2 from the ends of backwards on."""
    schedule = generate("gpipe", 2, 3)
    result = simulate(schedule, [ChunkCost(1, 1, 1, 5, 2), ChunkCost(1, 1, 1)])
    arrivals = [[t.end for t in row if t.action.kind.is_receive] for row in result.timeline]
    assert arrivals == [[13, 15, 17], [6, 7, 8]]
    assert result.makespan == 19 and result.busy == (9, 9)


def test_costs_say_what_activations_count_and_must_fit() -> None:
    result = simulate(generate("gpipe", 2, 3), [ChunkCost(1, 1, 1, activation=0.5), ChunkCost(1, 1, 1, activation=2)])
    assert result.peak_activations == (1.5, 6)
    with pytest.raises(ValueError, match="2 costs for 1"):
        simulate(generate("1f1b", 1, 1), [ChunkCost(1, 1, 1)] * 2)
