"""How long a schedule takes and what it holds in memory, from the costs of its chunks. Exact, without
contention."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from megasnn.schedule.actions import COLLECTIVES, COMPUTE, RECEIVES, SENDS, Action, Kind, Place, Schedule
from megasnn.schedule.costs import ChunkCost, Transfer
from megasnn.schedule.memory import activations_held
from megasnn.schedule.replica_link import ReplicaLinks
from megasnn.schedule.validate import runs


class TimedAction(NamedTuple):
    """An action, and when it starts and ends."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What happens when, and what follows from it; sequences have one entry per pipeline rank.

    Attributes:
        timeline: all actions, in order. A send takes as long as it holds up its rank; a receive ends when the tensor
        is ready for use; a gather or scatter is on its way from start to end, and holds up nobody. makespan: when
        the last rank is done. busy: time spent computing. idle: makespan less
        `busy`. bubble: the part of `idle` between a rank's first and last computation. peak_activations:
        the most that is held at once, in the unit of the costs.
    """

    timeline: tuple[tuple[TimedAction, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    idle: tuple[float, ...]
    bubble: tuple[float, ...]
    peak_activations: tuple[float, ...]


def simulate(
    schedule: Schedule,
    costs: Sequence[ChunkCost],
    wholes: Sequence[int] | None = None,
    sums: Mapping[Place, float] | None = None,
) -> Simulation:
    """When each action of a schedule starts and ends, and what follows from that.

    A transfer begins when the tensor is handed over and its receive is posted, whatever the two ranks compute
    meanwhile; the receiver waits for its end, the sender does not. Receives are posted as the executor posts them, see
    `Link`. Gradient sync takes no time. Gathers and scatters go one after another over a link of their own, beside
    what the rank computes; the first computation that uses the weights waits for them.

    Args:
        costs: one for each chunk.
        wholes: of every chunk, the number of the one that it is a unit of; None where each is one by itself.
        sums: what is queued behind an action on the link of gathers and scatters, and how long it takes there.
    Raises:
        ValueError: another number of costs; ScheduleError: a deadlock.
    """
    if len(costs) != schedule.chunks:
        raise ValueError(f"{len(costs)} costs for {schedule.chunks} chunks")
    return summarise(schedule, _times(schedule, costs, wholes, sums or {}), [cost.activation for cost in costs])


def summarise(
    schedule: Schedule, timeline: Sequence[Sequence[TimedAction]], activation: Sequence[float] | None = None
) -> Simulation:
    """What follows from a timeline, simulated or measured, that begins at 0.

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


def _times(
    schedule: Schedule, costs: Sequence[ChunkCost], wholes: Sequence[int] | None, sums: Mapping[Place, float]
) -> list[list[TimedAction]]:
    timeline: list[list[TimedAction]] = [[] for _ in schedule.actions]
    replicas = _replica_links(schedule, costs)
    for row, ends, actions in zip(
        timeline, _end_times(schedule, costs, wholes, replicas, sums), schedule.actions, strict=True
    ):
        row += map(TimedAction, actions, [0.0, *ends], ends)
    for (rank, index), (start, end) in replicas.apart.items():
        timeline[rank][index] = TimedAction(schedule.actions[rank][index], start, end)
    return timeline


Message = TypeVar("Message")


@dataclass
class Link(Generic[Message]):
    """All that one rank sends to another, forward and backward, first in, first out.

    One receive is posted at a time: when a computation begins, for what is received between it and the next one; and
    when that is called, where nothing was posted. What comes before its turn is kept.

    Attributes:
        coming: what is on its way, when it was handed over, and what it takes. early: what came before its turn.
        received: when the last receive was over.
    """

    coming: deque[tuple[Message, float, Transfer]] = field(default_factory=deque)
    early: list[Message] = field(default_factory=list)
    received: float = -1.0

    def receive(self, wanted: Message, now: float, started: Sequence[float]) -> float:
        """When a rank that waits from now on can use a message, which was handed over; it takes those before it, too.

        Args:
            started: when the last computation began; of several units that belong together, each.
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


def end_times(schedule: Schedule, costs: Sequence[ChunkCost], wholes: Sequence[int] | None = None) -> list[list[float]]:
    """When each action of each rank is over, as far as it holds up the rank. See `simulate`."""
    return _end_times(schedule, costs, wholes, _replica_links(schedule, costs), {})


def _replica_links(schedule: Schedule, costs: Sequence[ChunkCost]) -> ReplicaLinks:
    gathers, scatters = [cost.gather for cost in costs], [cost.scatter for cost in costs]
    return ReplicaLinks(schedule.ranks, {Kind.GATHER_WEIGHTS: gathers, Kind.SCATTER_GRADIENTS: scatters})


def _end_times(
    schedule: Schedule,
    costs: Sequence[ChunkCost],
    wholes: Sequence[int] | None,
    replicas: ReplicaLinks,
    sums: Mapping[Place, float],
) -> list[list[float]]:
    ends: list[list[float]] = [[] for _ in schedule.actions]
    clock = [0.0] * schedule.ranks
    computing = {kind: [cost.times()[kind] for cost in costs] for kind in COMPUTE}
    ways, links = _ways(costs), _links(schedule)
    whole = range(schedule.chunks) if wholes is None else wholes
    together: list[tuple[int, Kind, int | None] | None] = [None] * schedule.ranks
    started: list[list[float]] = [[] for _ in schedule.actions]
    for rank, run in runs(schedule):
        now, append, actions = clock[rank], ends[rank].append, schedule.actions[rank]
        for index in run:
            action = actions[index]
            chunk, kind, m = action
            if kind in computing:
                part = whole[chunk], _PASSES.get(kind, kind), m
                if part != together[rank]:
                    together[rank], started[rank] = part, []
                started[rank].append(now)
                time = computing[kind][chunk]
                now = replicas.use((rank, index), action, now, time) if replicas.coming else now + time
            elif kind in SENDS:
                now += ways[kind][chunk].send
                links[kind][chunk].coming.append((action.peer, now, ways[kind][chunk]))
            elif kind in RECEIVES:
                now = links[kind][chunk].receive(action, now, started[rank])
            elif kind in COLLECTIVES and kind is not Kind.SYNC_GRADIENTS:
                replicas.carry((rank, index), action, now)
            if sums and (rank, index) in sums:
                replicas.queue(rank, now, sums[rank, index])
            append(now)
        clock[rank] = now
    return ends


_PASSES = {Kind.INPUT_GRADIENT: Kind.BACKWARD, Kind.RECOMPUTE: Kind.BACKWARD}
"""Computations of units that are parts of one backward; see Transfers.announce."""


def _ways(costs: Sequence[ChunkCost]) -> dict[Kind, list[Transfer]]:
    """What a transfer by each chunk takes: of its output and of that of the chunk before it, and of their gradients."""
    outputs, gradients = [cost.way(True) for cost in costs], [cost.way(False) for cost in costs]
    return {
        Kind.SEND_FORWARD: outputs,
        Kind.RECV_FORWARD: [outputs[0], *outputs],
        Kind.SEND_BACKWARD: [gradients[0], *gradients],
        Kind.RECV_BACKWARD: gradients,
    }


def _links(schedule: Schedule) -> dict[Kind, list[Link[Action]]]:
    """For each kind of transfer, the link that each chunk's goes over."""
    placement = schedule.placement
    links: dict[tuple[int, int], Link[Action]] = {}
    before, after = (placement[-1], *placement[:-1]), (*placement[1:], placement[0])
    ends = {
        Kind.SEND_FORWARD: (placement, after),
        Kind.RECV_FORWARD: (before, placement),
        Kind.SEND_BACKWARD: (placement, before),
        Kind.RECV_BACKWARD: (after, placement),
    }
    return {
        kind: [links.setdefault(pair, Link()) for pair in zip(sources, targets, strict=True)]
        for kind, (sources, targets) in ends.items()
    }
