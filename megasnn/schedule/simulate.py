"""How long a schedule takes and what it holds in memory, from the costs of its chunks. Exact, without
contention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.memory import activations_held, stage_shares
from megasnn.schedule.validate import execution_order


@dataclass(frozen=True)
class ChunkCost:
    """Costs of one chunk for one micro-batch, times in any one unit.

    Attributes:
        forward, backward: time to compute. input_gradient, weight_gradient: that of a backward's two parts
        where it is split; each half of `backward` when not given.
        transfer: time to move the chunk's output to the next chunk's rank, and that of its gradient back.
        activation: what a forward holds until its backward or weight gradient is done; 1 counts micro-batches.
    """

    forward: float
    backward: float
    transfer: float = 0.0
    activation: float = 1.0
    input_gradient: float | None = None
    weight_gradient: float | None = None

    def time(self, kind: Kind) -> float:
        """Of one computation. Raises KeyError for a kind that is none."""
        half = self.backward / 2
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT_GRADIENT: half if self.input_gradient is None else self.input_gradient,
            Kind.WEIGHT_GRADIENT: half if self.weight_gradient is None else self.weight_gradient,
        }[kind]


def chunk_costs(stages: Sequence[ChunkCost], placement: Sequence[int]) -> list[ChunkCost]:
    """Costs of chunks from those of whole stages, one for each rank: a chunk costs its share of its stage.

    A transfer costs the same however small the chunks are: it carries the whole output of a layer.
    """
    costs = []
    for rank, share in zip(placement, stage_shares(placement), strict=True):
        stage = stages[rank]
        costs.append(
            ChunkCost(
                stage.forward * share,
                stage.backward * share,
                stage.transfer,
                stage.activation * share,
                stage.time(Kind.INPUT_GRADIENT) * share,
                stage.time(Kind.WEIGHT_GRADIENT) * share,
            )
        )
    return costs


@dataclass(frozen=True)
class TimedAction:
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What happens when, and what follows from it; sequences have one entry per pipeline rank.

    Attributes:
        timeline: all actions, in order. A send's time is the moment it is handed over; a receive's ends on
        arrival. makespan: when the last rank is done. busy: time spent computing. idle: makespan less
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

    A transfer begins when both ends have reached it and those before it on the link are over; the receiver
    waits for its end, the sender does not. Gradient sync takes no time.

    Args:
        costs: one for each chunk.
    Raises:
        ValueError: another number of costs; ScheduleError: a deadlock.
    """
    if len(costs) != schedule.chunks:
        raise ValueError(f"{len(costs)} costs for {schedule.chunks} chunks")
    timeline = _times(schedule, costs)
    makespan = max((row[-1].end for row in timeline if row), default=0.0)
    computed = [[timed for timed in row if timed.action.kind.is_compute] for row in timeline]
    busy = [sum(timed.end - timed.start for timed in row) for row in computed]
    return Simulation(
        timeline=tuple(tuple(row) for row in timeline),
        makespan=makespan,
        busy=tuple(busy),
        idle=tuple(makespan - time for time in busy),
        bubble=tuple(row[-1].end - row[0].start - time for row, time in zip(computed, busy, strict=True)),
        peak_activations=tuple(_peak(schedule, rank, costs) for rank in range(schedule.ranks)),
    )


def _times(schedule: Schedule, costs: Sequence[ChunkCost]) -> list[list[TimedAction]]:
    timeline: list[list[TimedAction]] = [[] for _ in schedule.actions]
    sent_at: dict[Action, float] = {}
    link_free: dict[tuple[int, int, Kind], float] = defaultdict(float)
    for rank, index in execution_order(schedule):
        action = schedule.actions[rank][index]
        start = timeline[rank][-1].end if timeline[rank] else 0.0
        end = start
        if action.kind.is_send:
            sent_at[action] = start
        elif action.kind.is_receive:
            link = (schedule.placement[action.peer.chunk], rank, action.kind)
            end = max(start, sent_at[action.peer], link_free[link]) + costs[_boundary(action)].transfer
            link_free[link] = end
        elif action.kind.is_compute:
            end = start + costs[action.chunk].time(action.kind)
        timeline[rank].append(TimedAction(action, start, end))
    return timeline


def _boundary(receive: Action) -> int:
    """The chunk whose output, or whose output's gradient, is transferred."""
    return min(receive.chunk, receive.peer.chunk)


def _peak(schedule: Schedule, rank: int, costs: Sequence[ChunkCost]) -> float:
    return max(activations_held(schedule, rank, [cost.activation for cost in costs]), default=0.0)
