"""What schedules would take, side by side, so that a choice can be understood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megasnn.schedule.actions import Schedule
from megasnn.schedule.generate import NAMES, CostsOf, generate
from megasnn.schedule.simulate import ChunkCost, Simulation, simulate


@dataclass(frozen=True)
class Forecast:
    """A schedule's simulation in short.

    Attributes:
        makespan: in the unit of the costs. idle_share: the part of all ranks' time in which they do not compute.
        activations: the most that a rank holds, in the unit of the costs.
    """

    name: str
    makespan: float
    idle_share: float
    activations: float


def forecast(schedule: Schedule, costs: Sequence[ChunkCost]) -> Forecast:
    """
    Args:
        costs: of each chunk.
    """
    result = simulate(schedule, costs)
    return Forecast(schedule.name, result.makespan, idle_share(result), max(result.peak_activations))


def idle_share(result: Simulation) -> float:
    """The bubble: idle time over the time of all ranks; 0 for a schedule that takes no time."""
    whole = result.makespan * len(result.idle)
    return sum(result.idle) / whole if whole else 0.0


def forecasts_of_named(
    stages: int,
    micro_batches: int,
    costs_of: CostsOf,
    memory_limit: float | None = None,
    chunks_per_rank: Sequence[int] = (1, 2),
) -> list[Forecast]:
    """Of every named schedule that fits, the fastest first.

    Args:
        chunks_per_rank: the numbers that the model can be cut into; others are left out.
    """
    found = []
    for name in NAMES:
        for count in chunks_per_rank:
            if name == "interleaved" and count == 1:
                continue  # it is 1f1b
            try:
                schedule = generate(name, stages, micro_batches, count, costs_of, memory_limit)
            except ValueError:
                continue  # it cannot place so many chunks, or keep the limit
            found.append(forecast(schedule, costs_of(schedule.placement)))
    return sorted(found, key=lambda each: each.makespan)
