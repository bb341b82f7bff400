"""Simulation of a schedule: times and memory from the costs of its chunks. Exact, without contention."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megasnn.schedule.actions import COMPUTE, RECEIVES, SENDS, USES_WEIGHTS, Action, Kind, Position, Schedule
from megasnn.schedule.costs import ChunkCost, Transfer
from megasnn.schedule.memory import activations_held
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
        timeline: all actions, in order. A send takes as long as it holds up its rank; a receive ends when the tensor is
            ready for use; UNSHARD and REDUCE_SCATTER are on their way from start to end, and hold up nobody.
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


def simulate(
    schedule: Schedule,
    costs: Sequence[ChunkCost],
    wholes: Sequence[int] | None = None,
    sums: Mapping[Position, float] | None = None,
) -> Simulation:
    """Simulates a complete schedule.

    A transfer begins when the tensor is handed over and its receive is posted, whatever the two ranks compute
    meanwhile; the receiver waits for its end, the sender does not. Receives are posted as the executor posts them, see
    `_Link`. REDUCE_GRAD takes no time. UNSHARD and REDUCE_SCATTER go one after another over a link of their own, beside
    what the rank computes; the first computation that uses the weights waits for them.

    Args:
        costs: one for each chunk.
        wholes: of every chunk, the number of the one that it is a unit of; None where each is one by itself.
        sums: seconds on the link of UNSHARD and REDUCE_SCATTER that are queued there behind an action.
    Raises:
        ValueError: another number of costs; ScheduleError: a deadlock.
    """
    if len(costs) != schedule.chunks:
        raise ValueError(f"{len(costs)} costs for {schedule.chunks} chunks")
    timeline = _timeline(schedule, costs, range(schedule.chunks) if wholes is None else wholes, sums or {})
    return summarise(schedule, timeline, [cost.activation for cost in costs])


def summarise(
    schedule: Schedule, timeline: Sequence[Sequence[TimedAction]], activation: Sequence[float] | None = None
) -> Simulation:
    """Sums up a timeline, simulated or measured, that begins at 0.

    Args:
        timeline: of each rank.
        activation: of each chunk; when not given, a rank's chunks are equal parts of one stage.
    """
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
            max(activations_held(schedule, rank, activation), default=0.0) for rank in range(schedule.ranks)
        ),
    )


@dataclass
class _Link:
    """All that one rank sends to another, forward and backward, first in, first out.

    One receive is posted at a time: when a computation begins, for what is received between it and the next one; and
    when that is called, where nothing was posted. What comes before its turn is kept.

    Attributes:
        coming: messages on their way, when they were handed over, and what they take. early: those before their turn.
        received: end of the last receive.
    """

    coming: deque[tuple[Action, float, Transfer]] = field(default_factory=deque)
    early: list[Action] = field(default_factory=list)
    received: float = -1.0

    def receive(self, wanted: Action, now: float, started: Sequence[float]) -> float:
        """Time at which a rank that waits from now on can use a message; it takes those before it, too.

        Args:
            started: beginning of the last computation; of several units that belong together, of each.
        """
        if wanted in self.early:
            self.early.remove(wanted)
            return now
        while True:
            first, sent, way = self.coming.popleft()
            posted = next((start for start in started if start >= self.received), now)
            now = self.received = max(now, max(sent, posted) + way.time) + way.receive
            if first == wanted:
                return now
            self.early.append(first)


@dataclass
class _ReplicaLink:
    """Link of a rank to the other replicas, which carries one thing after another.

    Attributes:
        coming: end of each chunk's UNSHARD, until its weights are used.
    """

    free: float = 0.0
    coming: dict[int, float] = field(default_factory=dict)

    def queue(self, now: float, seconds: float) -> tuple[float, float]:
        """Start and end of something that takes so long, behind what is there already."""
        start = max(now, self.free)
        self.free = start + seconds
        return start, self.free


_PASSES = {Kind.INPUT_GRADIENT: Kind.BACKWARD, Kind.RECOMPUTE: Kind.BACKWARD}
"""Computations of units that are parts of one backward; see Transfers.announce."""


def _timeline(
    schedule: Schedule, costs: Sequence[ChunkCost], wholes: Sequence[int], sums: Mapping[Position, float]
) -> list[list[TimedAction]]:
    timeline: list[list[TimedAction]] = [[] for _ in schedule.actions]
    clock = [0.0] * schedule.ranks
    computing = {kind: [cost.times()[kind] for cost in costs] for kind in COMPUTE}
    carrying = {
        Kind.UNSHARD: [cost.unshard for cost in costs],
        Kind.REDUCE_SCATTER: [cost.reduce_scatter for cost in costs],
    }
    ways, links = _ways(costs), _links(schedule)
    replicas = [_ReplicaLink() for _ in schedule.actions]
    together: list[tuple[int, Kind, int | None] | None] = [None] * schedule.ranks
    started: list[list[float]] = [[] for _ in schedule.actions]
    for rank, run in runs(schedule):
        now, append, actions, replica = clock[rank], timeline[rank].append, schedule.actions[rank], replicas[rank]
        for index in run:
            action = actions[index]
            chunk, kind, m = action
            start = now
            if kind in computing:
                part = wholes[chunk], _PASSES.get(kind, kind), m
                if part != together[rank]:
                    together[rank], started[rank] = part, []
                started[rank].append(now)
                if kind in USES_WEIGHTS and replica.coming:
                    start = max(now, replica.coming.pop(chunk, now))
                now = end = start + computing[kind][chunk]
            elif kind in SENDS:
                now = end = now + ways[kind][chunk].send
                links[kind][chunk].coming.append((action.peer, now, ways[kind][chunk]))
            elif kind in RECEIVES:
                now = end = links[kind][chunk].receive(action, now, started[rank])
            elif kind in carrying:
                start, end = replica.queue(now, carrying[kind][chunk])
                if kind is Kind.UNSHARD:
                    replica.coming[chunk] = end
            else:
                end = now
            if sums and (rank, index) in sums:
                replica.queue(now, sums[rank, index])
            append(TimedAction(action, start, end))
        clock[rank] = now
    return timeline


def _ways(costs: Sequence[ChunkCost]) -> dict[Kind, list[Transfer]]:
    """Transfer by each chunk: of its output and of that of the chunk before it, and of their gradients."""
    outputs, gradients = [cost.way(True) for cost in costs], [cost.way(False) for cost in costs]
    return {
        Kind.SEND_FORWARD: outputs,
        Kind.RECV_FORWARD: [outputs[0], *outputs],
        Kind.SEND_BACKWARD: [gradients[0], *gradients],
        Kind.RECV_BACKWARD: gradients,
    }


def _links(schedule: Schedule) -> dict[Kind, list[_Link]]:
    """Link that each chunk's transfers of each kind go over."""
    placement = schedule.placement
    links: dict[tuple[int, int], _Link] = {}
    before, after = (placement[-1], *placement[:-1]), (*placement[1:], placement[0])
    ends = {
        Kind.SEND_FORWARD: (placement, after),
        Kind.RECV_FORWARD: (before, placement),
        Kind.SEND_BACKWARD: (placement, before),
        Kind.RECV_BACKWARD: (after, placement),
    }
    return {
        kind: [links.setdefault(pair, _Link()) for pair in zip(sources, targets, strict=True)]
        for kind, (sources, targets) in ends.items()
    }
