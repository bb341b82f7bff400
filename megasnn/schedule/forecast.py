"""What schedules would take, side by side, so that a choice can be understood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megasnn.schedule.actions import Schedule
from megasnn.schedule.evaluate import of_named
from megasnn.schedule.named import SCHEDULES, CostsOf, possible_chunks
from megasnn.schedule.simulate import ChunkCost, Simulation, simulate
from megasnn.schedule.validate import ROUNDING


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
    return _share(sum(result.idle), result.makespan * len(result.idle))


def _share(idle: float, whole: float) -> float:
    return idle / whole if whole else 0.0


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
    for name, count in ((name, count) for name in SCHEDULES for count in chunks_per_rank):
        if not possible_chunks(name, count) or count < SCHEDULES[name].chunks:
            continue  # interleaved with one chunk is 1f1b
        best = of_named(name, stages, micro_batches, count, costs_of, filled_by=costs_of)
        if memory_limit is None or best.held <= memory_limit + ROUNDING:
            costs = costs_of(best.placement)
            whole_backward = not SCHEDULES[name].looks_at_costs
            backward = [cost.backward if whole_backward else cost.split_backward for cost in costs]
            busy = micro_batches * sum(cost.forward + time for cost, time in zip(costs, backward, strict=True))
            whole = stages * best.makespan
            found.append(Forecast(name, best.makespan, _share(whole - busy, whole), best.held))
    return sorted(found, key=lambda each: each.makespan)
