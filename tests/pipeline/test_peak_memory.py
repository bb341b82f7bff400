"""Bytes of a rank at each of its computations, by hand; and forwards that are computed again for a budget."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts
from megasnn.pipeline.peak_memory import SegmentMemory, moments, most_under_way, peak_moments, within_budget
from megasnn.schedule import Kind, Schedule, generate, validate_schedule
from megasnn.schedule.costs import resident_activations
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.passes import insert_recompute, refine

WORKING = {Kind.FORWARD: 5, Kind.BACKWARD: 7, Kind.INPUT_GRADIENT: 6, Kind.WEIGHT_GRADIENT: 4, Kind.RECOMPUTE: 3}
UNIT = SegmentMemory(100, 10, WORKING, deferred=60, recompute_seconds=1.0, transfers=22, cast=0)


def _told(name: str, rank: int, micro_batches: int) -> dict[str, tuple[int, int, int]]:
    """On two stages."""
    found = moments(generate(name, 2, micro_batches), rank, [UNIT, UNIT])
    return {str(each.action): (each.stashed, each.working, each.messages) for each in found}


def test_what_is_kept_and_what_travels() -> None:
    """1F1B with three micro-batches on two stages: 0F0 0F1 0B0 0F2 0B1 0B2, and 1F0 1B0 1F1 1B1 1F2 1B2."""
    first, last = _told("1f1b", 0, 3), _told("1f1b", 1, 3)
    assert first["0F0"] == (0, 5, 22) and first["0F1"] == (100, 5, 22) and first["0B0"] == (200, 7, 22)
    assert last["1B0"] == (100, 7, 22) and last["1F1"] == (0, 5, 22)


def test_a_backward_in_two_parts_leaves_less() -> None:
    last = _told("zb1p", 1, 2)
    assert last["1I0"] == (100, 6, 22)
    assert last["1F1"][0] == 60 and last["1W1"][0] == 60


def test_a_forward_that_is_computed_again_keeps_its_input() -> None:
    schedule = insert_recompute(refine(generate("gpipe", 1, 2), [2]), lambda segment, m: True)
    found = {str(action): numbers for action, *numbers in moments(schedule, 0, [UNIT, UNIT])}
    assert found["0F0"] == [10, 5, 0] and found["1F0"] == [20, 5, 0]
    assert found["1R0"] == [40, 3, 0] and found["0R0"] == [30, 3, 0]


def test_the_peak_of_a_step() -> None:
    """1F1B keeps two micro-batches on the first of two stages, one on the second."""
    layers = [
        LayerCost(1, 1, 1, held=10, working=(30, 5, 2), message=3, gradient=12, output=12, deferred=10),
        LayerCost(1, 1, 1, held=20, working=(25, 40, 2), deferred=20),
    ]
    costs = PipelineCosts(tuple(layers), LinkCost())
    first, last = peak_moments(generate("1f1b", 2, 4), [range(0, 1), range(1, 2)], costs)
    assert first[1:] == (10, 30, 15), "the second forward"
    assert last[1:] == (20, 40, 15), "any backward"
    (alone,) = peak_moments(generate("1f1b", 1, 4), [range(0, 2)], costs)
    assert alone.messages == 0 and alone.total == 10 + 20 + 40
    (behind,) = peak_moments(generate("1f1b", 1, 4), [range(0, 2)], costs, exchanged=[500])
    assert behind.total == 500


@pytest.mark.parametrize("name", ["gpipe", "zbv"])
def test_chunks_need_what_their_layers_need_one_after_another(name: str) -> None:
    costs = PipelineCosts((LayerCost(1, 1, 1, held=10, working=(30, 20, 5), message=3, gradient=12),) * 8, LinkCost())
    schedule = generate(name, 2, 4)
    size = 8 // schedule.segments
    bounds = [range(size * chunk, size * chunk + size) for chunk in range(schedule.segments)]
    segments = peak_moments(refine(schedule, [size] * schedule.segments), [range(i, i + 1) for i in range(8)], costs)
    assert [each.total for each in peak_moments(schedule, bounds, costs)] == [each.total for each in segments]


MB = 10**6


def segments_of(count: int, seed: int) -> list[SegmentMemory]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        held = draw.randint(2, 20) * MB
        kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.RECOMPUTE)
        working = {kind: held + draw.randint(0, 5) * MB for kind in kinds}
        found.append(SegmentMemory(held, held // 20, working, held, draw.randint(1, 9), 0, 0))
    return found


def peak(schedule: Schedule, rank: int, segments: list[SegmentMemory], chosen: frozenset[int]) -> float:
    """By activations alone, not by the sum that found the choice."""
    done = insert_recompute(schedule, lambda segment, m: segment in chosen)
    validate_schedule(done)
    held = resident_activations(done, rank, [each.resident for each in segments], [each.entering for each in segments])
    actions = done.actions[rank]
    again = {(segment, m) for segment, kind, m in actions if kind is Kind.RECOMPUTE}
    needed = [
        # The input is kept before its forward begins.
        segments[segment].working.get(kind, 0)
        + (kind is Kind.FORWARD and (segment, m) in again) * segments[segment].entering
        for segment, kind, m in actions
    ]
    return max(before + more for before, more in zip([0, *held], needed, strict=False))


@pytest.mark.parametrize("seed", range(4))
def test_little_more_than_the_cheapest_choice(seed: int) -> None:
    """Against all choices of segments, for every budget that makes a difference: on average at most 1.3 times as
    long."""
    segments = segments_of(6, seed)
    schedule = refine(generate("gpipe", 1, 2), [6])
    every = [frozenset(some) for count in range(7) for some in combinations(range(6), count)]

    def seconds(chosen: frozenset[int]) -> float:
        return sum(segments[segment].recompute_seconds for segment in chosen)

    by_peak = sorted((peak(schedule, 0, segments, some), seconds(some)) for some in every)
    most = peak(schedule, 0, segments, frozenset(range(6)))
    taken = least = 0.0
    for budget in sorted({each for each, _ in by_peak if each >= most})[::5]:
        found = within_budget(schedule, segments, budget + 1)
        assert peak(schedule, 0, segments, found) <= budget + 1
        taken += seconds(found)
        least += min(cost for needed, cost in by_peak if needed <= budget)
    assert taken <= 1.3 * least
    with pytest.raises(ValueError, match=f"--memory-budget {-int(-most // MB)};"):
        within_budget(schedule, segments, most - MB)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_rank_of_every_schedule_keeps_it(name: str) -> None:
    schedule = generate(name, 4, 8)
    schedule = refine(schedule, [3] * schedule.segments)
    segments = segments_of(schedule.segments, 7)
    without = [peak(schedule, rank, segments, frozenset()) for rank in range(4)]
    least = [peak(schedule, rank, segments, frozenset(range(schedule.segments))) for rank in range(4)]
    budget = (max(least) + max(without)) / 2
    chosen = within_budget(schedule, segments, budget)
    for rank, needed in enumerate(without):
        assert peak(schedule, rank, segments, chosen) <= budget + 1
        if needed <= budget:
            assert not any(schedule.placement[segment] == rank for segment in chosen), "nothing that is not needed"
    assert within_budget(schedule, segments, max(without) + 1) == frozenset()


@pytest.mark.parametrize(
    ("schedule", "under_way"), [("gpipe", [4, 4]), ("1f1b", [2, 1]), ("zb1p", [2, 2])]
)  # fmt: skip
def test_micro_batches_under_way(schedule: str, under_way: list[int]) -> None:
    """Until their weight gradients."""
    actions = generate(schedule, 2, 4).actions
    assert [most_under_way(order, segment) for segment, order in enumerate(actions)] == under_way
