"""Exact times and memory from segment costs, without contention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megasnn.schedule.actions import COMPUTE, RECEIVES, USES_WEIGHTS, Action, Kind, Schedule
from megasnn.schedule.costs import ChunkCost, resident_activations
from megasnn.schedule.validate import runs


class TimedAction(NamedTuple):
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Sequences have one entry per pipeline rank.

    Attributes:
        timeline: all actions in order. A receive ends when the tensor arrives. UNSHARD and REDUCE_SCATTER are in
            flight from start to end.
        idle: makespan minus `busy`.
        bubble: idle time between a rank's first and last computation.
        peak_activations: in the costs' unit.
    """

    timeline: tuple[tuple[TimedAction, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    idle: tuple[float, ...]
    bubble: tuple[float, ...]
    peak_activations: tuple[float, ...]

    @property
    def idle_share(self) -> float:
        """Idle fraction over all ranks; 0 if the schedule takes no time."""
        whole = self.makespan * len(self.idle)
        return sum(self.idle) / whole if whole else 0.0


def simulate(schedule: Schedule, costs: Sequence[ChunkCost]) -> Simulation:
    """Simulates a complete schedule, with one cost per segment.

    A receiver waits for its message, a sender does not. REDUCE_GRAD takes no time. UNSHARD and REDUCE_SCATTER queue on
    a separate link beside the computations.

    Raises:
        ValueError: another number of costs.
        ScheduleError: a deadlock.
    """
    if len(costs) != schedule.segments:
        raise ValueError(f"{len(costs)} costs for {schedule.segments} segments")
    timeline = _timeline(schedule, costs)
    activation = [cost.activation for cost in costs]
    ends = []
    busy = []
    bubble = []
    peaks = []
    for rank, row in enumerate(timeline):
        computed = [timed for timed in row if timed.action.kind in COMPUTE]
        seconds = sum(timed.end - timed.start for timed in computed)
        ends.append(max((timed.end for timed in row), default=0.0))
        busy.append(seconds)
        bubble.append(computed[-1].end - computed[0].start - seconds)
        peaks.append(max(resident_activations(schedule, rank, activation), default=0.0))
    makespan = max(ends, default=0.0)
    return Simulation(
        timeline=tuple(map(tuple, timeline)),
        makespan=makespan,
        busy=tuple(busy),
        idle=tuple(makespan - seconds for seconds in busy),
        bubble=tuple(bubble),
        peak_activations=tuple(peaks),
    )


@dataclass
class _ReplicaLink:
    """A rank's link to the other replicas, which carries one collective at a time."""

    free: float = 0.0  # when the last collective ends
    # By segment, when its UNSHARD ends; until the weights are used.
    gathering: dict[int, float] = field(default_factory=dict)

    def queue(self, now: float, seconds: float) -> tuple[float, float]:
        """Returns the collective's start and end."""
        start = max(now, self.free)
        self.free = start + seconds
        return start, self.free


def _timeline(schedule: Schedule, costs: Sequence[ChunkCost]) -> list[list[TimedAction]]:
    computing = {kind: [0.0] * len(costs) for kind in COMPUTE}
    # Segment u sends back across the boundary of segment u - 1, whose cost holds the time: hence the 0 in front.
    transfer = {Kind.SEND_FORWARD: list[float](), Kind.SEND_BACKWARD: [0.0]}
    collective = {Kind.UNSHARD: list[float](), Kind.REDUCE_SCATTER: list[float]()}
    for segment, cost in enumerate(costs):
        for kind, seconds in cost.times().items():
            computing[kind][segment] = seconds
        transfer[Kind.SEND_FORWARD].append(cost.transfer)
        transfer[Kind.SEND_BACKWARD].append(cost.transfer_back)
        collective[Kind.UNSHARD].append(cost.unshard)
        collective[Kind.REDUCE_SCATTER].append(cost.reduce_scatter)
    timeline: list[list[TimedAction]] = [[] for _ in schedule.actions]
    links = [_ReplicaLink() for _ in schedule.actions]
    clock = [0.0] * schedule.ranks
    arrivals: dict[Action, float] = {}
    for rank, indices in runs(schedule):
        now = clock[rank]
        link = links[rank]
        order = schedule.actions[rank]
        append = timeline[rank].append
        for index in indices:
            action = order[index]
            segment, kind, _ = action
            start = now
            if kind in computing:
                # Only the first use waits for the gather.
                if kind in USES_WEIGHTS and link.gathering:
                    start = max(now, link.gathering.pop(segment, now))
                now = start + computing[kind][segment]
            elif kind in transfer:
                arrivals[action.peer] = now + transfer[kind][segment]
            elif kind in RECEIVES:
                now = max(now, arrivals.pop(action))
            end = now
            if kind in collective:
                start, end = link.queue(now, collective[kind][segment])
                if kind is Kind.UNSHARD:
                    link.gathering[segment] = end
            append(TimedAction(action, start, end))
        clock[rank] = now
    return timeline
