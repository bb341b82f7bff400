"""Simulation of a schedule: times and memory from the costs of its segments. Exact, without contention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megasnn.schedule.actions import COMPUTE, RECEIVES, USES_WEIGHTS, Action, Kind, Schedule
from megasnn.schedule.costs import ChunkCost, resident_activations
from megasnn.schedule.validate import runs


class TimedAction(NamedTuple):
    """An action with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Timeline of a schedule and its sums; sequences have one entry per pipeline rank.

    Attributes:
        timeline: all actions, in order. A send takes no time; a receive ends when the tensor has arrived; UNSHARD and
            REDUCE_SCATTER are on their way from start to end, and hold up nobody.
        makespan: end of the last rank.
        busy: time spent computing. idle: makespan less `busy`.
        bubble: the part of `idle` between a rank's first and last computation.
        peak_activations: most that is held at once, in the unit of the costs.
    """

    timeline: tuple[tuple[TimedAction, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    idle: tuple[float, ...]
    bubble: tuple[float, ...]
    peak_activations: tuple[float, ...]

    @property
    def idle_share(self) -> float:
        """Idle time over the time of all ranks; 0 for a schedule that takes no time."""
        whole = self.makespan * len(self.idle)
        return sum(self.idle) / whole if whole else 0.0


def simulate(schedule: Schedule, costs: Sequence[ChunkCost]) -> Simulation:
    """Simulates a complete schedule.

    A message arrives when it was sent and its time is over, whatever the two ranks compute meanwhile; the receiver
    waits for that, the sender does not. REDUCE_GRAD takes no time. UNSHARD and REDUCE_SCATTER go one after another over
    a link of their own, beside what the rank computes; the first computation that uses the weights waits for them.

    Args:
        costs: one for each segment.
    Raises:
        ValueError: another number of costs; ScheduleError: a deadlock.
    """
    if len(costs) != schedule.segments:
        raise ValueError(f"{len(costs)} costs for {schedule.segments} segments")
    timeline, activation = _timeline(schedule, costs), [cost.activation for cost in costs]
    makespan = max((timed.end for row in timeline for timed in row), default=0.0)
    computed = [[timed for timed in row if timed.action.kind in COMPUTE] for row in timeline]
    busy = [sum(timed.end - timed.start for timed in row) for row in computed]
    return Simulation(
        timeline=tuple(tuple(row) for row in timeline),
        makespan=makespan,
        busy=tuple(busy),
        idle=tuple(makespan - time for time in busy),
        bubble=tuple(row[-1].end - row[0].start - time for row, time in zip(computed, busy, strict=True)),
        peak_activations=tuple(
            max(resident_activations(schedule, rank, activation), default=0.0) for rank in range(schedule.ranks)
        ),
    )


@dataclass
class _ReplicaLink:
    """Link of a rank to the other replicas, which carries one thing after another.

    Attributes:
        coming: end of each segment's UNSHARD, until its weights are used.
    """

    free: float = 0.0
    coming: dict[int, float] = field(default_factory=dict)

    def queue(self, now: float, seconds: float) -> tuple[float, float]:
        """Start and end of something that takes so long, behind what is there already."""
        start = max(now, self.free)
        self.free = start + seconds
        return start, self.free


def _timeline(schedule: Schedule, costs: Sequence[ChunkCost]) -> list[list[TimedAction]]:
    timeline: list[list[TimedAction]] = [[] for _ in schedule.actions]
    clock = [0.0] * schedule.ranks
    computing = {kind: [cost.times()[kind] for cost in costs] for kind in COMPUTE}
    moving = {
        Kind.SEND_FORWARD: [cost.transfer for cost in costs],
        Kind.SEND_BACKWARD: [0.0, *(cost.transfer_back for cost in costs)],
    }
    carrying = {
        Kind.UNSHARD: [cost.unshard for cost in costs],
        Kind.REDUCE_SCATTER: [cost.reduce_scatter for cost in costs],
    }
    replicas = [_ReplicaLink() for _ in schedule.actions]
    arrives: dict[Action, float] = {}
    for rank, run in runs(schedule):
        now, append, actions, replica = clock[rank], timeline[rank].append, schedule.actions[rank], replicas[rank]
        for index in run:
            action = actions[index]
            segment, kind, _ = action
            start = now
            if kind in computing:
                if kind in USES_WEIGHTS and replica.coming:
                    start = max(now, replica.coming.pop(segment, now))
                now = start + computing[kind][segment]
            elif kind in moving:
                arrives[action.peer] = now + moving[kind][segment]
            elif kind in RECEIVES:
                now = max(now, arrives.pop(action))
            end = now
            if kind in carrying:
                start, end = replica.queue(now, carrying[kind][segment])
                if kind is Kind.UNSHARD:
                    replica.coming[segment] = end
            append(TimedAction(action, start, end))
        clock[rank] = now
    return timeline
