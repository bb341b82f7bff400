"""How long a schedule takes and what it holds in memory, from the costs of its chunks. Exact, without
contention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megasnn.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule
from megasnn.schedule.memory import activations_held, stage_shares
from megasnn.schedule.validate import runs


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
        again: time of a forward that is computed again; that of the forward when not given.
    """

    forward: float
    backward: float
    transfer: float = 0.0
    activation: float = 1.0
    input_gradient: float | None = None
    weight_gradient: float | None = None
    output: Transfer | None = None
    gradient: Transfer | None = None
    again: float | None = None

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
            Kind.RECOMPUTE: self.forward if self.again is None else self.again,
        }

    @property
    def split_backward(self) -> float:
        """Time of a backward in two parts."""
        times = self.times()
        return times[Kind.INPUT_GRADIENT] + times[Kind.WEIGHT_GRADIENT]

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
                again=stage.time(Kind.RECOMPUTE) * share,
            )
        )
    return costs


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
    """When each action of a schedule starts and ends, and what follows from that.

    On each link one receive is posted ahead: the first at the beginning, the next when the one before it is over.
    A transfer begins when the tensor is handed over and its receive is posted, whatever the two ranks compute
    meanwhile; the receiver waits for its end, the sender does not. Gradient sync takes no time.

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


def _times(schedule: Schedule, costs: Sequence[ChunkCost]) -> list[list[TimedAction]]:
    timeline: list[list[TimedAction]] = [[] for _ in schedule.actions]
    for row, ends, actions in zip(timeline, end_times(schedule, costs), schedule.actions, strict=True):
        row += map(TimedAction, actions, [0.0, *ends], ends)
    return timeline


def end_times(schedule: Schedule, costs: Sequence[ChunkCost]) -> list[list[float]]:
    """When each action of each rank is over; the next one starts right then. See `simulate`."""
    ends: list[list[float]] = [[] for _ in schedule.actions]
    clock = [0.0] * schedule.ranks
    computing = {kind: [cost.times()[kind] for cost in costs] for kind in COMPUTE}
    ways = _ways(costs)
    sent_at: dict[tuple[int, Kind, int | None], float] = {}  # by the action that receives it
    posted_at = _posting(schedule)
    for rank, run in runs(schedule):
        now, append = clock[rank], ends[rank].append
        for action in schedule.actions[rank][run.start : run.stop]:
            chunk, kind, _ = action
            if kind in computing:
                now += computing[kind][chunk]
            elif kind in SENDS:
                now += ways[kind][chunk].send
                sent_at[action.peer] = now
            elif kind in RECEIVES:
                way, posted = ways[kind][chunk], posted_at[kind][chunk]
                now = max(now, max(sent_at[action], posted[0]) + way.time) + way.receive
                posted[0] = now
            append(now)
        clock[rank] = now
    return ends


def _ways(costs: Sequence[ChunkCost]) -> dict[Kind, list[Transfer]]:
    """What a transfer by each chunk takes: of its output and of that of the chunk before it, and of their gradients."""
    outputs, gradients = [cost.way(True) for cost in costs], [cost.way(False) for cost in costs]
    return {
        Kind.SEND_FORWARD: outputs,
        Kind.RECV_FORWARD: [outputs[0], *outputs],
        Kind.SEND_BACKWARD: [gradients[0], *gradients],
        Kind.RECV_BACKWARD: gradients,
    }


def _posting(schedule: Schedule) -> dict[Kind, list[list[float]]]:
    """When each chunk's next receive was posted: a box that it shares with the chunks that receive on the same link."""
    placement = schedule.placement
    links: dict[tuple[int, int, Kind], list[float]] = {}
    boxes: dict[Kind, list[list[float]]] = {}
    for kind, step in ((Kind.RECV_FORWARD, -1), (Kind.RECV_BACKWARD, 1)):
        senders = [placement[(chunk + step) % len(placement)] for chunk in range(len(placement))]
        pairs = zip(senders, placement, strict=True)
        boxes[kind] = [links.setdefault((*pair, kind), [0.0]) for pair in pairs]
    return boxes
