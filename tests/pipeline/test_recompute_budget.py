"""Forwards that are computed again for a budget of memory."""

from __future__ import annotations

import random
import time
from itertools import combinations

import pytest

from megasnn.pipeline.peak_memory import UnitMemory
from megasnn.pipeline.recompute import BudgetError, within_budget
from megasnn.schedule import Kind, Schedule, generate, validate
from megasnn.schedule.memory import activations_held
from megasnn.schedule.named import SCHEDULES
from megasnn.schedule.passes import insert_recompute, refine
from megasnn.schedule.plan import Repeated

MB = 10**6


def units_of(count: int, seed: int) -> list[UnitMemory]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        held = draw.randint(2, 20) * MB
        kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
        working = {kind: held + draw.randint(0, 5) * MB for kind in kinds}
        working[Kind.RECOMPUTE] = held + draw.randint(0, 5) * MB
        found.append(UnitMemory(held, held // 20, working, held, draw.randint(1, 9), 0, 0, 0, 0))
    return found


def peak(schedule: Schedule, rank: int, units: list[UnitMemory], chosen: Repeated) -> float:
    """By activations alone, not by the sum that found the choice."""
    done = insert_recompute(schedule, lambda unit, m: (unit, m) in chosen)
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
    """Against all choices, for every budget that makes a difference: on average at most 1.3 times as long."""
    units = units_of(4, seed)
    schedule = refine(generate("gpipe", 1, 2), [4])
    places = [(unit, m) for unit in range(4) for m in range(2)]
    every = [frozenset(some) for count in range(9) for some in combinations(places, count)]

    def seconds(chosen: Repeated) -> float:
        return sum(units[unit].again for unit, _ in chosen)

    by_peak = sorted((peak(schedule, 0, units, some), seconds(some)) for some in every)
    most = peak(schedule, 0, units, frozenset(places))
    taken = least = 0.0
    for budget in sorted({each for each, _ in by_peak if each >= most})[::5]:
        found = within_budget(schedule, units, budget + 1)
        assert peak(schedule, 0, units, found) <= budget + 1
        taken += seconds(found)
        least += min(cost for needed, cost in by_peak if needed <= budget)
    assert taken <= 1.3 * least
    with pytest.raises(BudgetError) as refused:
        within_budget(schedule, units, most - MB)
    assert refused.value.least == most


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_rank_of_every_schedule_keeps_it(name: str) -> None:
    schedule = generate(name, 4, 8)
    schedule = refine(schedule, [3] * schedule.chunks)
    units = units_of(schedule.chunks, 7)
    without = [peak(schedule, rank, units, frozenset()) for rank in range(4)]
    everything = frozenset((unit, m) for unit in range(schedule.chunks) for m in range(8))
    least = [peak(schedule, rank, units, everything) for rank in range(4)]
    budget = (max(least) + max(without)) / 2
    chosen = within_budget(schedule, units, budget)
    for rank, needed in enumerate(without):
        assert peak(schedule, rank, units, chosen) <= budget + 1
        if needed <= budget:
            assert not any(schedule.placement[unit] == rank for unit, _ in chosen), "nothing that is not needed"
    assert within_budget(schedule, units, max(without) + 1) == frozenset()


@pytest.mark.slow
def test_a_large_model_takes_less_than_five_seconds() -> None:
    schedule = refine(generate("gpipe", 2, 16), [20, 20])
    units = units_of(40, 3)
    full = max(peak(schedule, rank, units, frozenset()) for rank in range(2))
    begun = time.thread_time()
    chosen = within_budget(schedule, units, full / 2)
    assert time.thread_time() - begun < 5
    assert max(peak(schedule, rank, units, chosen) for rank in range(2)) <= full / 2 + 1
