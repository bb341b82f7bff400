"""The most that a step needs in memory on each pipeline rank, from a schedule and the costs of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megasnn.pipeline.costs import PipelineCosts
from megasnn.schedule import Schedule
from megasnn.schedule.memory import UnitMemory, micro_batches_under_way, moments
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


def step_peaks(
    schedule: Schedule, bounds: Sequence[range], costs: PipelineCosts, exchanged: Sequence[int] = ()
) -> list[StepPeak]:
    """Of each pipeline rank.

    Args:
        bounds: the layers of each chunk.
        exchanged: of each, the bytes that travel to and from those who own rows, when all backwards are done.
    """
    units = costs.unit_memory(bounds, schedule.placement)
    return [
        replace(_peak(schedule, rank, units, each), on_host=round(most_on_host(schedule, rank, units)))
        for rank, each in enumerate(exchanged or [0] * schedule.ranks)
    ]


def _peak(schedule: Schedule, rank: int, units: Sequence[UnitMemory], exchanged: int) -> StepPeak:
    found = moments(schedule, rank, units, exchanged=exchanged)
    needed = [(each.kept, each.working, each.messages) for each in found]
    return StepPeak(*map(round, max(needed, key=sum)))


def graphs_bytes(schedule: Schedule, rank: int, bounds: Sequence[range], costs: PipelineCosts) -> int:
    """What the graphs of layers keep on a rank from their first replays on, see graphs.py: for as many micro-batches as
    are under way at once, what forwards and first parts of backwards leave, outputs, and gradients of inputs.

    Args: as of `step_peaks`.
    """
    total = 0
    for chunk, slots in micro_batches_under_way(schedule, rank).items():
        span = bounds[chunk]
        layers, before = costs.layers[span.start : span.stop], costs.layers[max(0, span.start - 1) : span.stop]
        total += slots * sum(each.held + each.deferred_bytes + each.waiting for each in layers)
        total += slots * sum(each.waiting for each in before if each.gradient)
    return total
