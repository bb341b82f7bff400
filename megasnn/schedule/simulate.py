"""How long a schedule takes and what it holds in memory, from the costs of its chunks. Exact, without
contention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megasnn.schedule.actions import COMPUTE, RECEIVES, SENDS, USES_WEIGHTS, Action, Kind, Place, Schedule
from megasnn.schedule.memory import activations_held, stage_shares
from megasnn.schedule.validate import runs

ON_REPLICA_LINK = frozenset({Kind.GATHER_WEIGHTS, Kind.SCATTER_GRADIENTS})


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
        gather, scatter: how long the link to the other replicas takes for the chunk's weights, and for the gradients of
        one micro-batch.
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
    gather: float = 0.0
    scatter: float = 0.0

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
                gather=stage.gather * share,
                scatter=stage.scatter * share,
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
        is ready for use; a gather or scatter is on its way from start to end, and holds up nobody.
        makespan: when everything is over. busy: time spent computing. idle: makespan less `busy`. bubble: the part of
        `idle` between a rank's first and last computation. peak_activations: the most that is held at once, in the
        unit of the costs.
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
    meanwhile; the receiver waits for its end, the sender does not. Gradient sync takes no time. Gathers and scatters
    of a rank follow each other on a link of their own; the first computation that uses the weights waits for them.

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


def _times(schedule: Schedule, costs: Sequence[ChunkCost]) -> list[list[TimedAction]]:
    timeline: list[list[TimedAction]] = [[] for _ in schedule.actions]
    links = _ReplicaLinks(schedule.ranks, costs)
    for row, ends, actions in zip(timeline, _end_times(schedule, costs, links), schedule.actions, strict=True):
        row += map(TimedAction, actions, [0.0, *ends], ends)
    for (rank, index), (start, end) in links.apart.items():
        timeline[rank][index] = TimedAction(schedule.actions[rank][index], start, end)
    return timeline


class _ReplicaLinks:
    """The link of each rank to the other replicas, which carries its gathers and scatters one after another.

    Attributes:
        apart: start and end of gathers and scatters, and of computations that wait for a gather.
        coming: for each chunk whose weights were gathered and are not used yet, when they are there.
    """

    def __init__(self, ranks: int, costs: Sequence[ChunkCost]) -> None:
        self.apart: dict[Place, tuple[float, float]] = {}
        self._free_at = [0.0] * ranks
        self.coming: dict[int, float] = {}
        self._times = {
            Kind.GATHER_WEIGHTS: [cost.gather for cost in costs],
            Kind.SCATTER_GRADIENTS: [cost.scatter for cost in costs],
        }

    def carry(self, place: Place, action: Action, now: float) -> None:
        """Takes on a gather or scatter that a rank hands over now."""
        rank, _ = place
        start = max(now, self._free_at[rank])
        end = self._free_at[rank] = start + self._times[action.kind][action.chunk]
        self.apart[place] = start, end
        if action.kind is Kind.GATHER_WEIGHTS:
            self.coming[action.chunk] = end

    def use(self, place: Place, action: Action, now: float, time: float) -> float:
        """When a computation is over that could start now, and takes `time` from when its weights are there."""
        ready = self.coming.pop(action.chunk, now) if action.kind in USES_WEIGHTS else now
        if ready > now:
            self.apart[place] = ready, ready + time
        return max(now, ready) + time


def end_times(schedule: Schedule, costs: Sequence[ChunkCost]) -> list[list[float]]:
    """When each action of each rank is over, as far as the rank is held up by it. See `simulate`."""
    return _end_times(schedule, costs, _ReplicaLinks(schedule.ranks, costs))


def _end_times(schedule: Schedule, costs: Sequence[ChunkCost], links: _ReplicaLinks) -> list[list[float]]:
    ends: list[list[float]] = [[] for _ in schedule.actions]
    clock = [0.0] * schedule.ranks
    computing = {kind: [cost.times()[kind] for cost in costs] for kind in COMPUTE}
    ways = _ways(costs)
    sent_at: dict[tuple[int, Kind, int | None], float] = {}  # by the action that receives it
    posted_at = _posting(schedule)
    for rank, run in runs(schedule):
        now, append, actions = clock[rank], ends[rank].append, schedule.actions[rank]
        for index in run:
            action = actions[index]
            chunk, kind, _ = action
            if kind in computing:
                time = computing[kind][chunk]
                now = links.use((rank, index), action, now, time) if links.coming else now + time
            elif kind in SENDS:
                now += ways[kind][chunk].send
                sent_at[action.peer] = now
            elif kind in RECEIVES:
                way, posted = ways[kind][chunk], posted_at[kind][chunk]
                now = max(now, max(sent_at[action], posted[0]) + way.time) + way.receive
                posted[0] = now
            elif kind in ON_REPLICA_LINK:
                links.carry((rank, index), action, now)
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
