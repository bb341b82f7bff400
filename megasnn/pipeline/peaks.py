"""The most that a step needs in memory on each pipeline rank, from a schedule and the costs of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megasnn.pipeline.costs import PipelineCosts
from megasnn.schedule import Schedule
from megasnn.schedule.memory import UnitMemory, cast_bytes, moments
from megasnn.schedule.offload import most_on_host


@dataclass(frozen=True)
class StepPeak:
    """Bytes at the moment of a step when a pipeline rank needs most, above weights, gradients and optimizer state.

    Attributes:
        kept: what forwards have left for their backwards.
        working: what the computation under way needs beside that.
        messages: tensors that wait, or are on their way from and to other stages, or to replicas that own them.
        on_host: of all moments the most that is in the host's memory, which is no part of the total.
    """

    kept: int
    working: int
    messages: int
    on_host: int = 0

    @property
    def total(self) -> int:
        return self.kept + self.working + self.messages


def step_peaks(schedule: Schedule, bounds: Sequence[range], costs: PipelineCosts, exchanged: int = 0) -> list[StepPeak]:
    """Of each pipeline rank.

    Args:
        bounds: the layers of each chunk.
        exchanged: bytes that replicas have on their way to each other when all backwards are done.
    """
    units = costs.unit_memory(bounds, schedule.placement)
    return [
        replace(_peak(schedule, rank, units, exchanged), on_host=round(most_on_host(schedule, rank, units)))
        for rank in range(schedule.ranks)
    ]


def _peak(schedule: Schedule, rank: int, units: Sequence[UnitMemory], exchanged: int) -> StepPeak:
    needed = [(each.kept, each.working, each.messages) for each in moments(schedule, rank, units)]
    needed.append((cast_bytes(schedule, rank, units), 0.0, exchanged))
    return StepPeak(*map(round, max(needed, key=sum)))
