"""What schedules take and hold, in short: for searches, which look at many, and side by side for people who choose."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megasnn.schedule.actions import Schedule
from megasnn.schedule.costs import ChunkCost
from megasnn.schedule.memory import activations_held
from megasnn.schedule.named import SCHEDULES, CostsOf, FixedOrder, complete, named_schedule, possible_chunks
from megasnn.schedule.simulate import Link, Simulation, end_times, simulate
from megasnn.schedule.streams import FORWARD, KINDS, Rows, Ticks, as_schedule, takers_of
from megasnn.schedule.validate import ROUNDING


@dataclass(frozen=True)
class Candidate:
    """An order, computing alone, and what comes of it.

    Attributes:
        order: a schedule, or the rows of one.
        makespan: simulated. held: the most activations on a rank; both in the unit of the costs.
    """

    name: str
    placement: tuple[int, ...]
    micro_batches: int
    order: Schedule | Rows
    makespan: float
    held: float

    def schedule(self) -> Schedule:
        """Complete, with transfers and gradient sync."""
        if isinstance(self.order, Schedule):
            return complete(self.order)
        return complete(as_schedule(self.name, self.placement, self.micro_batches, self.order))


def of_rows(
    name: str, placement: tuple[int, ...], micro_batches: int, rows: Rows, costs: Sequence[ChunkCost]
) -> Candidate:
    """Of rows in which no two boundaries share a link: one chunk on each rank, or two as a V."""
    return Candidate(name, placement, micro_batches, rows, _makespan(placement, rows, costs), _held(rows, costs))


def of_schedule(order: Schedule, costs: Sequence[ChunkCost]) -> Candidate:
    """Of a schedule, computing alone."""
    activation = [cost.activation for cost in costs]
    held = max(max(activations_held(order, rank, activation)) for rank in range(order.ranks))
    makespan = max(row[-1] for row in end_times(complete(order), costs))
    return Candidate(order.name, order.placement, order.micro_batches, order, makespan, held)


def of_named(
    name: str, stages: int, micro_batches: int, chunks_per_rank: int, costs_of: CostsOf, filled_by: CostsOf
) -> Candidate:
    """Of a named schedule.

    Args:
        costs_of: the costs that time and memory are counted in. filled_by: those that decide where weight gradients go.
    """
    named = SCHEDULES[name]
    placement = named.placement(stages, chunks_per_rank)
    if isinstance(named, FixedOrder):
        return of_schedule(named_schedule(name, stages, micro_batches, chunks_per_rank, filled_by), costs_of(placement))
    filled = named.recipe(name, stages).fill(Ticks.of(placement, filled_by(placement), micro_batches), micro_batches)
    assert filled is not None, f"{name} on {stages} stages keeps its memory"
    return of_rows(name, placement, micro_batches, filled.rows, costs_of(placement))


def _held(rows: Rows, costs: Sequence[ChunkCost]) -> float:
    change = [part for cost in costs for part in (cost.activation, 0.0, -cost.activation)]
    return max(max(accumulate(map(change.__getitem__, row))) for row in rows)


def _makespan(placement: tuple[int, ...], rows: Rows, costs: Sequence[ChunkCost]) -> float:
    """What `simulate` finds for the complete schedule, from the rows alone and in the same sums.

    A computation is taken together with the receive before it and the send after it.
    """
    times = [cost.times()[kind] for cost in costs for kind in KINDS]
    takers = takers_of(len(placement))
    ways = {
        taker: costs[min(giver, taker) // 3].way(taker % 3 == FORWARD)
        for giver, taker in enumerate(takers)
        if taker >= 0 and placement[giver // 3] != placement[taker // 3]
    }
    way_of = [ways.get(each) for each in range(len(times))]  # of its input
    way_on = [ways.get(each) for each in takers]
    link_of = _links(placement, takers)  # of its input
    sent = [0] * len(times)  # messages that were not used
    started: list[list[float]] = [[] for _ in rows]
    clock, position = [0.0] * len(rows), [0] * len(rows)
    waiting = [-1] * len(rows)  # the stream whose input a rank waits for
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        row, now = rows[rank], clock[rank]
        waiting[rank] = -1
        for at in range(position[rank], len(row)):
            stream = row[at]
            if way_of[stream] is not None:
                if not sent[stream]:
                    waiting[rank], position[rank] = stream, at
                    break
                sent[stream] -= 1
                now = link_of[stream].receive(stream, now, started[rank])
            started[rank] = [now]
            now += times[stream]
            way = way_on[stream]
            if way is not None:
                now += way.send
                taker = takers[stream]
                sent[taker] += 1
                link_of[taker].coming.append((taker, now, way))
                home = placement[taker // 3]
                if waiting[home] == taker:
                    waiting[home] = -1
                    ready.append(home)
        clock[rank] = now
    return max(clock)


def _links(placement: Sequence[int], takers: Sequence[int]) -> list[Link[int]]:
    """Of each stream that over which its input comes; any other one for streams that get nothing from another rank."""
    givers = {taker: giver for giver, taker in enumerate(takers)}
    links: dict[tuple[int, int], Link[int]] = {}
    pairs = ((placement[givers.get(each, each) // 3], placement[each // 3]) for each in range(len(takers)))
    return [links.setdefault(pair, Link()) for pair in pairs]


@dataclass(frozen=True)
class Forecast:
    """A schedule's simulation in short.

    Attributes:
        makespan: in the unit of the costs. idle_share: the part of all ranks' time in which they do not compute.
        activations: the most that a rank holds, in the unit of the costs.
    """

    name: str
    makespan: float
    idle_share: float
    activations: float


def forecast(schedule: Schedule, costs: Sequence[ChunkCost], wholes: Sequence[int] | None = None) -> Forecast:
    """A schedule simulated at these costs, in short. Arguments as of `simulate`."""
    result = simulate(schedule, costs, wholes)
    return Forecast(schedule.name, result.makespan, idle_share(result), max(result.peak_activations))


def idle_share(result: Simulation) -> float:
    """The bubble: idle time over the time of all ranks; 0 for a schedule that takes no time."""
    return _share(sum(result.idle), result.makespan * len(result.idle))


def _share(idle: float, whole: float) -> float:
    return idle / whole if whole else 0.0


def forecasts_of_named(
    stages: int,
    micro_batches: int,
    costs_of: CostsOf,
    memory_limit: float | None = None,
    chunks_per_rank: Sequence[int] = (1, 2),
) -> list[Forecast]:
    """Of every named schedule that fits, the fastest first.

    Args:
        chunks_per_rank: the numbers that the model can be cut into; others are left out.
    """
    found = []
    for name, count in ((name, count) for name in SCHEDULES for count in chunks_per_rank):
        if not possible_chunks(name, count) or count < SCHEDULES[name].chunks:
            continue  # interleaved with one chunk is 1f1b
        best = of_named(name, stages, micro_batches, count, costs_of, filled_by=costs_of)
        if memory_limit is None or best.held <= memory_limit + ROUNDING:
            costs = costs_of(best.placement)
            whole_backward = not SCHEDULES[name].looks_at_costs
            backward = [cost.backward if whole_backward else cost.split_backward for cost in costs]
            busy = micro_batches * sum(cost.forward + time for cost, time in zip(costs, backward, strict=True))
            whole = stages * best.makespan
            found.append(Forecast(name, best.makespan, _share(whole - busy, whole), best.held))
    return sorted(found, key=lambda each: each.makespan)
