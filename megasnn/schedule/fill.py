"""Puts weight gradients (W) where a rank would wait: the mechanism behind all zero-bubble schedules.

Forwards and input gradients have a fixed order on each rank. With the costs at hand, `fill` decides when weight
gradients run: in gaps that are long enough, and when their memory is needed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.costs import ChunkCost

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT
RESOLUTION = 50  # bits of the longest possible time
ROUNDING = 1e-9
NEARLY = 1 - 1e-7  # a gap as long as a weight gradient, but for the rounding to whole ticks
NO_CUTOFF = (math.inf, 0.0)


@dataclass(frozen=True)
class Ticks:
    """Costs of a placement's chunks in whole ticks, which add without rounding in whichever order.

    Attributes:
        placement: rank of each chunk.
        times: of forward, input and weight gradient of each chunk.
        moved: from the end of each chunk's forward or input gradient until the chunk that takes its result can use it.
        work: of each rank for one micro-batch.
        duration: time of a tick, a power of two.
    """

    placement: tuple[int, ...]
    times: dict[Kind, list[int]]
    moved: dict[Kind, list[int]]
    work: list[int]
    duration: float

    @classmethod
    def of(cls, placement: tuple[int, ...], costs: Sequence[ChunkCost], micro_batches: int) -> Ticks:
        """Ticks as fine as the sum of all that `micro_batches` could take allows. Args: costs: of each chunk."""
        times = {kind: [cost.times()[kind] for cost in costs] for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)}
        moved = {
            FORWARD: [_latency(placement, costs, chunk, chunk + 1) for chunk in range(len(costs))],
            INPUT_GRADIENT: [_latency(placement, costs, chunk, chunk - 1) for chunk in range(len(costs))],
        }
        longest = micro_batches * (sum(map(sum, times.values())) + sum(map(sum, moved.values())))
        duration = math.ldexp(1.0, math.frexp(longest)[1] - RESOLUTION)
        whole, on_the_way = (
            {k: [round(t / duration) for t in each] for k, each in of.items()} for of in (times, moved)
        )
        work = [0] * (max(placement) + 1)
        for each in whole.values():
            for rank, time in zip(placement, each, strict=True):
                work[rank] += time
        return cls(placement, whole, on_the_way, work, duration)


def _latency(placement: Sequence[int], costs: Sequence[ChunkCost], chunk: int, taker: int) -> float:
    if not 0 <= taker < len(placement) or placement[taker] == placement[chunk]:
        return 0.0
    return costs[chunk].transfer if taker > chunk else costs[taker].transfer_back


@dataclass(frozen=True)
class Filled:
    """Schedule with weight gradients.

    Attributes:
        makespan, bubble: end of the last rank, and the longest wait of a rank between its first and last computation;
            ticks.
    """

    schedule: Schedule
    makespan: int
    bubble: int


def fill(
    ticks: Ticks, order: Schedule, limit: float, gap: float = 1.0, cutoff: tuple[float, float] = NO_CUTOFF
) -> Filled | None:
    """Puts weight gradients into an order; None if it cannot keep the limit, or is no better than `cutoff`.

    Everything happens in the order of time: a heap holds the next computation of each rank, and a computation changes
    that for its own rank and for the rank that takes its result.

    Args:
        order: forwards and input gradients of each rank.
        limit: activations that a rank may hold, in whole stages' micro-batches.
        gap: a weight gradient is put where the rank would wait for at least this part of its time.
        cutoff: (makespan, bubble) in ticks; orders that take longer, or as long with such a bubble, are given up.
    """
    return _Run(ticks, order, limit, gap).finish(*cutoff)


class _Run:
    """State of all ranks while their orders are served in the order of time.

    Attributes:
        served: actions served. free: end of the last one. left: actions still to serve, last first.
        steps: key of the next computation of each rank, -1 where there is none: (start, is a weight gradient, rank) in
            one number, since what happens first comes first.
        arrivals: times of the results that each chunk has not used yet.
        pending: weight gradients that each rank can do.
    """

    def __init__(self, ticks: Ticks, order: Schedule, limit: float, gap: float) -> None:
        ranks, chunks, placement = order.ranks, order.segments, ticks.placement
        self.ticks, self.order = ticks, order
        self.served: list[list[Action]] = [[] for _ in range(ranks)]
        self.left = [[*reversed(row)] for row in order.actions]
        self.free, self.resident, self.steps = [0] * ranks, [0] * ranks, [-1] * ranks
        self.pending: list[deque[Action]] = [deque() for _ in range(ranks)]
        self.arrivals: dict[Kind, list[deque[int]]] = {
            kind: [deque() for _ in range(chunks)] for kind in (FORWARD, INPUT_GRADIENT)
        }
        self.arrivals[FORWARD][0].extend([0] * order.micro_batches)
        self.room = [math.floor(limit * placement.count(rank) + ROUNDING) for rank in range(ranks)]
        self.gaps = [math.ceil(gap * NEARLY * time) for time in ticks.times[WEIGHT_GRADIENT]]
        self.heap: list[int] = []
        self.bits = ranks.bit_length()

    def look(self, rank: int) -> None:
        """Finds the next computation of a rank, as far as it is known."""
        now, start, left = self.free[rank], -1, self.left[rank]
        if left:
            chunk, kind, _ = left[-1]
            arrived = self.arrivals[kind][chunk]
            if arrived and (kind is not FORWARD or self.resident[rank] < self.room[rank]):
                start = max(arrived[0], now)
        pending = self.pending[rank]
        weights = bool(pending) and (start < 0 or start > now and start - now >= self.gaps[pending[0][0]])
        step = -1
        if weights or start >= 0:
            step = (2 * (now if weights else start) + weights) << self.bits | rank
            if step != self.steps[rank]:
                heappush(self.heap, step)
        self.steps[rank] = step

    def finish(self, longest: float, widest: float) -> Filled | None:
        """Serves all orders; None where they get stuck, or cannot be done in the longest time with a smaller bubble."""
        ticks, steps, bits, heap, served = self.ticks, self.steps, self.bits, self.heap, self.served
        look, left, free, resident, arrivals, pending = (
            self.look, self.left, self.free, self.resident, self.arrivals, self.pending
        )  # fmt: skip
        placement, times, last = ticks.placement, ticks.times, len(ticks.placement) - 1
        mask, waited, bubble = (1 << bits) - 1, [0] * len(served), [0] * len(served)
        work = [self.order.micro_batches * each for each in ticks.work]
        for rank in range(len(served)):
            look(rank)
        while heap:
            step = heappop(heap)
            rank = step & mask
            if step != steps[rank]:
                continue  # something better has come up for the rank
            steps[rank] = -1
            start = step >> bits + 1
            if start > free[rank]:
                wait = start - free[rank]
                waited[rank] += wait
                if served[rank]:
                    bubble[rank] += wait
                least = waited[rank] + work[rank]
                if least > longest or least == longest and bubble[rank] >= widest:
                    return None
            action = pending[rank].popleft() if step >> bits & 1 else left[rank].pop()
            chunk, kind, m = action
            end = free[rank] = start + times[kind][chunk]
            served[rank].append(action)
            if kind is WEIGHT_GRADIENT:
                resident[rank] -= 1
                look(rank)
                continue
            arrivals[kind][chunk].popleft()
            if kind is FORWARD:
                resident[rank] += 1
                taker, takes = (chunk + 1, FORWARD) if chunk < last else (chunk, INPUT_GRADIENT)  # the loss turns round
            else:
                pending[rank].append(Action(chunk, WEIGHT_GRADIENT, m))
                taker, takes = chunk - 1, INPUT_GRADIENT
            if taker >= 0:
                queue = arrivals[takes][taker]
                queue.append(end + (ticks.moved[kind][chunk] if taker != chunk else 0))
                other = placement[taker]
                if other != rank and len(queue) == 1 and left[other] and left[other][-1][:2] == (taker, takes):
                    look(other)  # it may have waited for this
            look(rank)
        if sum(map(len, served)) < 3 * len(placement) * self.order.micro_batches:
            return None
        return Filled(replace(self.order, actions=tuple(map(tuple, served))), max(free), max(bubble))
