"""Puts weight gradients where a rank would wait: the one mechanism behind all zero-bubble schedules.

Forwards and input gradients have a fixed order on each rank. What is left to decide, with the costs at hand,
is when weight gradients run: in gaps that are long enough, and when their memory is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.memory import stage_shares
from megasnn.schedule.simulate import ChunkCost

ROUNDING = 1e-9
Order = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class Filled:
    """
    Attributes:
        schedule: computing alone.
        makespan, bubble: when the last rank is done, and the longest that a rank waits between its first and last
            action, if every receive were posted from the beginning.
    """

    schedule: Schedule
    makespan: float
    bubble: float


def fill(
    name: str,
    placement: tuple[int, ...],
    micro_batches: int,
    order: Order,
    costs: Sequence[ChunkCost],
    limit: float,
    gap: float = 1.0,
) -> Filled | None:
    """The schedule with weight gradients put in; None if the order cannot keep the limit.

    Args:
        order: forwards and input gradients of each rank.
        costs: of each chunk.
        limit: activations that a rank may hold, in whole stages' micro-batches.
        gap: a weight gradient is put in where the rank would wait for at least this part of its time.
    """
    run = _Run(placement, order, costs, limit, gap)
    for _ in range(3 * len(placement) * micro_batches):
        step = min(filter(None, run.steps), default=None)
        if step is None:
            return None
        run.take(*step)
    schedule = Schedule(name, placement, micro_batches, tuple(map(tuple, run.rows)))
    return Filled(schedule, max(run.free), max(run.bubble))


Step = tuple[float, bool, int]  # (start, whether it is a weight gradient, rank)


class _Run:
    """
    Attributes:
        rows: what each rank has done. free: until when. bubble: how long it has waited since its first action.
        steps: what each rank would do next; None where it cannot do anything.
    """

    def __init__(
        self, placement: tuple[int, ...], order: Order, costs: Sequence[ChunkCost], limit: float, gap: float
    ) -> None:
        self.placement, self.order, self.limit = placement, order, limit
        self.shares = stage_shares(placement)
        self.times = [cost.times() for cost in costs]
        self.moved = {forward: _latencies(placement, costs, forward) for forward in (True, False)}
        self.waits = [gap * times[Kind.WEIGHT_GRADIENT] - ROUNDING for times in self.times]
        ranks = len(order)
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.at, self.free, self.held, self.bubble = [0] * ranks, [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
        self.pending: list[deque[Action]] = [deque() for _ in range(ranks)]
        self.end: dict[tuple[int, Kind, int | None], float] = {}
        self.steps = [self._next(rank) for rank in range(ranks)]

    def _next(self, rank: int) -> Step | None:
        start, free = self._start(rank), self.free[rank]
        if self.pending[rank]:
            wait = self.waits[self.pending[rank][0].chunk]
            if start is None or start - free >= wait and start > free:
                return free, True, rank
        return None if start is None else (start, False, rank)

    def _start(self, rank: int) -> float | None:
        """When the next action in order can start; None while that is unknown or memory is lacking."""
        if self.at[rank] == len(self.order[rank]):
            return None
        action = self.order[rank][self.at[rank]]
        chunk, m = action.chunk, action.micro_batch
        if action.kind is Kind.FORWARD:
            if self.held[rank] + self.shares[chunk] > self.limit + ROUNDING:
                return None
            if chunk == 0:
                return self.free[rank]
            needed, moved = (chunk - 1, Kind.FORWARD, m), self.moved[True][chunk - 1]
        elif chunk == len(self.placement) - 1:
            needed, moved = (chunk, Kind.FORWARD, m), 0.0
        else:
            needed, moved = (chunk + 1, Kind.INPUT_GRADIENT, m), self.moved[False][chunk]
        if needed not in self.end:
            return None
        return max(self.free[rank], self.end[needed] + moved)

    def take(self, start: float, weights: bool, rank: int) -> None:
        if weights:
            action = self.pending[rank].popleft()
            self.held[rank] -= self.shares[action.chunk]
        else:
            action = self.order[rank][self.at[rank]]
            self.at[rank] += 1
            if action.kind is Kind.FORWARD:
                self.held[rank] += self.shares[action.chunk]
            else:
                self.pending[rank].append(Action(action.chunk, Kind.WEIGHT_GRADIENT, action.micro_batch))
        if self.rows[rank]:
            self.bubble[rank] += start - self.free[rank]
        end = start + self.times[action.chunk][action.kind]
        self.free[rank] = self.end[action.chunk, action.kind, action.micro_batch] = end
        self.rows[rank].append(action)
        # Only this rank and those that may have waited for the result have something new to consider.
        neighbours = self.placement[max(action.chunk - 1, 0) : action.chunk + 2]
        for changed in {rank, *neighbours}:
            self.steps[changed] = self._next(changed)


def _latencies(placement: Sequence[int], costs: Sequence[ChunkCost], forward: bool) -> list[float]:
    """From the end of a chunk's computing until its output, or the gradient of it, is ready on the other side."""
    ways = [cost.way(forward) for cost in costs[:-1]]
    return [
        0.0 if placement[chunk] == placement[chunk + 1] else way.send + way.time + way.receive
        for chunk, way in enumerate(ways)
    ]
