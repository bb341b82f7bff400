"""How long a schedule takes and what it holds in memory, from the costs of its chunks. Exact, without
contention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.memory import activations_held, stage_shares
from megasnn.schedule.validate import execution_order

Boundary = tuple[int, bool, int | None]  # (chunk whose output or its gradient crosses, whether it is the output, m)


@dataclass(frozen=True)
class Transfer:
    """The way of one tensor to another rank.

    Attributes:
        time: from the end of the send, with a receive posted, until everything has arrived.
        send: how long it holds up the sender (packing). receive: how long the receiver, after arrival (unpacking).
    """

    time: float
    send: float = 0.0
    receive: float = 0.0


@dataclass(frozen=True)
class ChunkCost:
    """Costs of one chunk for one micro-batch, times in any one unit.

    Attributes:
        forward, backward: time to compute. input_gradient, weight_gradient: that of a backward's two parts
        where it is split; each half of `backward` when not given.
        transfer: time to move the chunk's output to the next chunk's rank, and that of its gradient back.
        activation: what a forward holds until its backward or weight gradient is done; 1 counts micro-batches.
        output, gradient: the two ways in detail, in place of `transfer`.
    """

    forward: float
    backward: float
    transfer: float = 0.0
    activation: float = 1.0
    input_gradient: float | None = None
    weight_gradient: float | None = None
    output: Transfer | None = None
    gradient: Transfer | None = None

    def time(self, kind: Kind) -> float:
        """Of one computation. Raises KeyError for a kind that is none."""
        return self.times()[kind]

    def times(self) -> dict[Kind, float]:
        """Of every kind of computation."""
        half = self.backward / 2
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT_GRADIENT: half if self.input_gradient is None else self.input_gradient,
            Kind.WEIGHT_GRADIENT: half if self.weight_gradient is None else self.weight_gradient,
        }

    def way(self, forward: bool) -> Transfer:
        """Of the chunk's output, or of the gradient of it."""
        detailed = self.output if forward else self.gradient
        return Transfer(self.transfer) if detailed is None else detailed


def chunk_costs(stages: Sequence[ChunkCost], placement: Sequence[int]) -> list[ChunkCost]:
    """Costs of chunks from those of whole stages, one for each rank: a chunk costs its share of its stage.

    A transfer costs the same however small the chunks are: it carries the whole output of a layer.
    """
    costs = []
    for rank, share in zip(placement, stage_shares(placement), strict=True):
        stage = stages[rank]
        costs.append(
            replace(
                stage,
                forward=stage.forward * share,
                backward=stage.backward * share,
                activation=stage.activation * share,
                input_gradient=stage.time(Kind.INPUT_GRADIENT) * share,
                weight_gradient=stage.time(Kind.WEIGHT_GRADIENT) * share,
            )
        )
    return costs


class TimedAction(NamedTuple):
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What happens when, and what follows from it; sequences have one entry per pipeline rank.

    Attributes:
        timeline: all actions, in order. A send takes as long as it holds up its rank; a receive ends when the tensor
        is ready for use. makespan: when the last rank is done. busy: time spent computing. idle: makespan less
        `busy`. bubble: the part of `idle` between a rank's first and last computation. peak_activations:
        the most that is held at once, in the unit of the costs.
    """

    timeline: tuple[tuple[TimedAction, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    idle: tuple[float, ...]
    bubble: tuple[float, ...]
    peak_activations: tuple[float, ...]


def simulate(schedule: Schedule, costs: Sequence[ChunkCost]) -> Simulation:
    """Runs a schedule on paper.

    On each link one receive is posted ahead: the first at the beginning, the next when the one before it is over.
    A transfer begins when the tensor is handed over and its receive is posted, whatever the two ranks compute
    meanwhile; who receives waits for its end, who sends does not. Gradient sync takes no time.

    Args:
        costs: one for each chunk.
    Raises:
        ValueError: another number of costs; ScheduleError: a deadlock.
    """
    if len(costs) != schedule.chunks:
        raise ValueError(f"{len(costs)} costs for {schedule.chunks} chunks")
    return summarise(schedule, _times(schedule, costs), [cost.activation for cost in costs])


def summarise(
    schedule: Schedule, timeline: Sequence[Sequence[TimedAction]], activation: Sequence[float] | None = None
) -> Simulation:
    """What follows from a timeline, simulated or measured, that begins at 0.

    Args:
        timeline: of each rank.
        activation: of each chunk; when not given, a rank's chunks are equal parts of one stage.
    """
    makespan = max((row[-1].end for row in timeline if row), default=0.0)
    computed = [[timed for timed in row if timed.action.kind.is_compute] for row in timeline]
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


def _times(schedule: Schedule, costs: Sequence[ChunkCost]) -> list[list[TimedAction]]:
    timeline: list[list[TimedAction]] = [[] for _ in schedule.actions]
    clock = [0.0] * schedule.ranks
    computing = [cost.times() for cost in costs]
    ways = {forward: [cost.way(forward) for cost in costs] for forward in (True, False)}
    sent_at: dict[Boundary, float] = {}
    posted_at: dict[tuple[int, int, Kind], float] = defaultdict(float)
    for rank, index in execution_order(schedule):
        action = schedule.actions[rank][index]
        chunk, kind, micro_batch = action.chunk, action.kind, action.micro_batch
        start = end = clock[rank]
        if kind in computing[chunk]:
            end = start + computing[chunk][kind]
        elif kind is not Kind.SYNC_GRADIENTS:
            forward = kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
            crossed = chunk - (kind in (Kind.RECV_FORWARD, Kind.SEND_BACKWARD))
            way = ways[forward][crossed]
            boundary = crossed, forward, micro_batch
            if kind.is_send:
                end = sent_at[boundary] = start + way.send
            else:
                link = schedule.placement[crossed if forward else crossed + 1], rank, kind
                arrival = max(sent_at[boundary], posted_at[link]) + way.time
                end = posted_at[link] = max(start, arrival) + way.receive
        clock[rank] = end
        timeline[rank].append(TimedAction(action, start, end))
    return timeline
