"""Puts weight gradients where a rank would wait: the one mechanism behind all zero-bubble schedules.

Forwards and input gradients have a fixed order on each rank. What is left to decide, with the costs at hand,
is when weight gradients run: in gaps that are long enough, and when their memory is needed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from megasnn.schedule.streams import FORWARD, Rows, Ticks, takers_of

ROUNDING = 1e-9
NEARLY = 1 - 1e-7  # a gap that is as long as a weight gradient, but for the rounding to whole ticks
NO_CUTOFF = (math.inf, 0)


@dataclass(frozen=True)
class Filled:
    """Rows with their weight gradients, and how long they take.

    Attributes:
        rows: with weight gradients.
        makespan, bubble: when the last rank is done, and the longest that a rank waits between its first and last
            action, if every receive were posted from the beginning; ticks.
    """

    rows: Rows
    makespan: int
    bubble: int


def fill(
    ticks: Ticks,
    micro_batches: int,
    order: Rows,
    limit: float,
    gap: float = 1.0,
    cutoff: tuple[float, float] = NO_CUTOFF,
) -> Filled | None:
    """The rows with weight gradients put in; None if they cannot keep the limit, or are no better than `cutoff`.

    Everything happens in the order of time: a heap holds what each rank would do next, and a computation changes that
    for its own rank and for the rank that takes its result.

    Args:
        order: forwards and input gradients of each rank.
        limit: activations that a rank may hold, in whole stages' micro-batches.
        gap: a weight gradient is put in where the rank would wait for at least this part of its time.
        cutoff: (makespan, bubble) in ticks; given up is what takes longer, and what takes as long with such a bubble.
    """
    run = _Run(ticks, micro_batches, order, limit, gap)
    return run.finish(*cutoff)


class _Run:
    """The state of all ranks while their rows are served in the order of time.

    Attributes:
        rows: what each rank has done. free: until when. left: rows still to serve, last first.
        steps: the key of what each rank does next, -1 where it cannot do anything: (start, whether it is a weight
            gradient, rank) in one number, since what happens first comes first.
        arrivals: when the results that each stream has not used yet are there.
        pending: streams of the weight gradients that each rank can do.
    """

    def __init__(self, ticks: Ticks, micro_batches: int, order: Rows, limit: float, gap: float) -> None:
        placement, ranks = ticks.placement, len(order)
        self.ticks, self.end = ticks, len(ticks.times)
        self.rows: list[list[int]] = [[] for _ in range(ranks)]
        self.left = [[self.end, *reversed(row)] for row in order]
        self.free, self.held, self.steps = [0] * ranks, [0] * ranks, [-1] * ranks
        self.pending: list[deque[int]] = [deque() for _ in range(ranks)]
        self.arrivals: list[deque[int]] = [deque() for _ in range(self.end + 1)]  # nothing ever arrives for the end
        self.arrivals[FORWARD].extend([0] * micro_batches)
        self.room = [math.floor(limit * placement.count(rank) + ROUNDING) for rank in range(ranks)]
        self.gaps = [math.ceil(gap * NEARLY * time) for time in ticks.times]
        self.work = [micro_batches * time for time in ticks.work]
        self.total = 3 * len(placement) * micro_batches
        self.heap: list[int] = []
        self.bits = ranks.bit_length()

    def look(self, rank: int) -> None:
        """What a rank does next, as far as is known."""
        following, now, start = self.left[rank][-1], self.free[rank], -1
        arrived = self.arrivals[following]
        if arrived and (following % 3 != FORWARD or self.held[rank] < self.room[rank]):
            start = max(arrived[0], now)
        pending = self.pending[rank]
        weights = bool(pending) and (start < 0 or start > now and start - now >= self.gaps[pending[0]])
        step = -1
        if weights or start >= 0:
            step = (2 * (now if weights else start) + weights) << self.bits | rank
            if step != self.steps[rank]:
                heappush(self.heap, step)
        self.steps[rank] = step

    def finish(self, longest: float, widest: float) -> Filled | None:
        """Serves all rows; None where they get stuck, or cannot be done in the longest time with a smaller bubble."""
        ticks, steps, bits, heap = self.ticks, self.steps, self.bits, self.heap
        home, times, moved, takers = ticks.placement, ticks.times, ticks.moved, takers_of(len(ticks.placement))
        look, left, rows, free, held = self.look, self.left, self.rows, self.free, self.held
        arrivals, pending, work = self.arrivals, self.pending, self.work
        mask, waited, bubble = (1 << bits) - 1, [0] * len(rows), [0] * len(rows)
        for rank in range(len(rows)):
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
                if rows[rank]:
                    bubble[rank] += wait
                least = waited[rank] + work[rank]
                if least > longest or least == longest and bubble[rank] >= widest:
                    return None
            if step >> bits & 1:
                stream = pending[rank].popleft()
                held[rank] -= 1
            else:
                stream = left[rank].pop()
                arrivals[stream].popleft()
                if stream % 3 == FORWARD:
                    held[rank] += 1
                else:
                    pending[rank].append(stream + 1)  # the weight gradient of an input gradient
            end = free[rank] = start + times[stream]
            rows[rank].append(stream)
            taker = takers[stream]
            if taker >= 0:
                arrivals[taker].append(end + moved[stream])
                other = home[taker // 3]
                if other != rank and left[other][-1] == taker and len(arrivals[taker]) == 1:
                    look(other)  # it may have waited for this
            look(rank)
        if sum(map(len, rows)) < self.total:
            return None
        return Filled(rows, max(free), max(bubble))
