"""Puts weight gradients where a rank would wait: the one mechanism behind all zero-bubble schedules.

Forwards and input gradients have a fixed order on each rank. What is left to decide, with the costs at hand,
is when weight gradients run: in gaps that are long enough, and when their memory is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.memory import stage_shares
from megasnn.schedule.simulate import ChunkCost

ROUNDING = 1e-9
Order = Sequence[Sequence[Action]]


def fill(
    name: str,
    placement: tuple[int, ...],
    micro_batches: int,
    order: Order,
    costs: Sequence[ChunkCost],
    limit: float,
    gap: float = 1.0,
) -> Schedule | None:
    """The schedule with weight gradients filled in; None if the order cannot keep the limit.

    Args:
        order: forwards and input gradients of each rank.
        costs: of each chunk.
        limit: activations that a rank may hold, in whole stages' micro-batches.
        gap: a weight gradient is put in where the rank would wait for at least this part of its time.
    """
    run = _Run(placement, order, costs, limit, gap)
    for _ in range(3 * len(placement) * micro_batches):
        step = min((step for rank in range(len(order)) for step in run.possible(rank)), default=None)
        if step is None:
            return None
        run.take(*step)
    return Schedule(name, placement, micro_batches, tuple(map(tuple, run.rows)))


Step = tuple[float, bool, int]  # (start, whether it is a weight gradient, rank)


class _Run:
    def __init__(
        self, placement: tuple[int, ...], order: Order, costs: Sequence[ChunkCost], limit: float, gap: float
    ) -> None:
        self.placement, self.order, self.costs, self.limit, self.gap = placement, order, costs, limit, gap
        self.shares = stage_shares(placement)
        ranks = len(order)
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.at, self.free, self.held = [0] * ranks, [0.0] * ranks, [0.0] * ranks
        self.pending: list[deque[Action]] = [deque() for _ in range(ranks)]
        self.end: dict[tuple[int, Kind, int | None], float] = {}

    def possible(self, rank: int) -> Iterator[Step]:
        """What a rank would do next, if it can do anything."""
        start = self._start(rank)
        free = self.free[rank]
        if self.pending[rank]:
            wait = self.gap * self.costs[self.pending[rank][0].chunk].time(Kind.WEIGHT_GRADIENT)
            if start is None or start - free >= wait - ROUNDING and start > free:
                yield free, True, rank
                return
        if start is not None:
            yield start, False, rank

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
            needed, source = (chunk - 1, Kind.FORWARD, m), chunk - 1
        elif chunk == len(self.placement) - 1:
            needed, source = (chunk, Kind.FORWARD, m), chunk
        else:
            needed, source = (chunk + 1, Kind.INPUT_GRADIENT, m), chunk + 1
        if needed not in self.end:
            return None
        moved = 0.0 if self.placement[source] == rank else self.costs[min(chunk, source)].transfer
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
        self.free[rank] = self.end[action.chunk, action.kind, action.micro_batch] = start + self.costs[
            action.chunk
        ].time(action.kind)
        self.rows[rank].append(action)
