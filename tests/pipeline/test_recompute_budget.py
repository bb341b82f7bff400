"""Forwards that are computed again for a budget of memory."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from megasnn.pipeline.peak_memory import UnitMemory, within_budget
from megasnn.schedule import Kind, Schedule, generate, validate
from megasnn.schedule.memory import activations_held
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.passes import insert_recompute, refine

MB = 10**6


def units_of(count: int, seed: int) -> list[UnitMemory]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        held = draw.randint(2, 20) * MB
        kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.RECOMPUTE)
        working = {kind: held + draw.randint(0, 5) * MB for kind in kinds}
        found.append(UnitMemory(held, held // 20, working, held, draw.randint(1, 9), 0, 0))
    return found


def peak(schedule: Schedule, rank: int, units: list[UnitMemory], chosen: frozenset[int]) -> float:
    """By activations alone, not by the sum that found the choice."""
    done = insert_recompute(schedule, lambda unit, m: unit in chosen)
    validate(done)
    held = activations_held(done, rank, [each.held for each in units], [each.entering for each in units])
    actions = done.actions[rank]
    again = {(unit, m) for unit, kind, m in actions if kind is Kind.RECOMPUTE}
    needed = [
        # The input is kept before its forward begins.
        units[unit].working.get(kind, 0) + (kind is Kind.FORWARD and (unit, m) in again) * units[unit].entering
        for unit, kind, m in actions
    ]
    return max(before + more for before, more in zip([0, *held], needed, strict=False))


@pytest.mark.parametrize("seed", range(4))
def test_little_more_than_the_cheapest_choice(seed: int) -> None:
    """Against all choices of units, for every budget that makes a difference: on average at most 1.3 times as long."""
    units = units_of(6, seed)
    schedule = refine(generate("gpipe", 1, 2), [6])
    every = [frozenset(some) for count in range(7) for some in combinations(range(6), count)]

    def seconds(chosen: frozenset[int]) -> float:
        return sum(units[unit].again for unit in chosen)

    by_peak = sorted((peak(schedule, 0, units, some), seconds(some)) for some in every)
    most = peak(schedule, 0, units, frozenset(range(6)))
    taken = least = 0.0
    for budget in sorted({each for each, _ in by_peak if each >= most})[::5]:
        found = within_budget(schedule, units, budget + 1)
        assert peak(schedule, 0, units, found) <= budget + 1
        taken += seconds(found)
        least += min(cost for needed, cost in by_peak if needed <= budget)
    assert taken <= 1.3 * least
    with pytest.raises(ValueError, match=f"--memory-budget {-int(-most // MB)};"):
        within_budget(schedule, units, most - MB)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_rank_of_every_schedule_keeps_it(name: str) -> None:
    schedule = generate(name, 4, 8)
    schedule = refine(schedule, [3] * schedule.units)
    units = units_of(schedule.units, 7)
    without = [peak(schedule, rank, units, frozenset()) for rank in range(4)]
    least = [peak(schedule, rank, units, frozenset(range(schedule.units))) for rank in range(4)]
    budget = (max(least) + max(without)) / 2
    chosen = within_budget(schedule, units, budget)
    for rank, needed in enumerate(without):
        assert peak(schedule, rank, units, chosen) <= budget + 1
        if needed <= budget:
            assert not any(schedule.placement[unit] == rank for unit in chosen), "nothing that is not needed"
    assert within_budget(schedule, units, max(without) + 1) == frozenset()
