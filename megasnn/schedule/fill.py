"""Puts weight gradients (W) where a rank would wait: the mechanism behind all zero-bubble schedules.

Forwards and input gradients have a fixed order on each rank, as rows of streams. A stream is all computations of one
kind by one chunk, on ascending micro-batches: stream 3c + k is the forward (k = 0), the input gradient (1) or the
weight gradient (2) of chunk c. A row is a list of small numbers, and repeating a pattern repeats numbers. With the
costs at hand, `fill`
decides when weight gradients run: in gaps that are long enough, and when their memory is needed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import repeat

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.costs import ChunkCost

Rows = Sequence[Sequence[int]]
"""Streams of each rank, in order."""
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)
KINDS = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
RESOLUTION = 50  # bits of the longest possible time
ROUNDING = 1e-9
NEARLY = 1 - 1e-7  # a gap as long as a weight gradient, but for the rounding to whole ticks
NO_CUTOFF = (math.inf, 0.0)


def stream(chunk: int, kind: int) -> int:
    """Number of a stream; `kind` is FORWARD, INPUT_GRADIENT or WEIGHT_GRADIENT."""
    return 3 * chunk + kind


def takers_of(chunks: int) -> list[int]:
    """Stream that needs the result of each stream; -1 for none."""
    takers = [-1] * (3 * chunks)
    for chunk in range(chunks):
        turn = stream(chunk, INPUT_GRADIENT)
        takers[stream(chunk, FORWARD)] = stream(chunk + 1, FORWARD) if chunk + 1 < chunks else turn
        takers[turn] = stream(chunk - 1, INPUT_GRADIENT) if chunk else -1
    return takers


@dataclass(frozen=True)
class Ticks:
    """Costs of a placement's streams in whole ticks, which add without rounding in whichever order.

    Attributes:
        placement: rank of each chunk.
        times: of each stream.
        moved: from the end of each stream's computing until the stream that takes its result can use it.
        work: of each rank for one micro-batch.
        unit: time of a tick, a power of two.
    """

    placement: tuple[int, ...]
    times: tuple[int, ...]
    moved: tuple[int, ...]
    work: tuple[int, ...]
    unit: float

    @classmethod
    def of(cls, placement: tuple[int, ...], costs: Sequence[ChunkCost], micro_batches: int) -> Ticks:
        """Ticks as fine as the sum of all that `micro_batches` could take allows. Args: costs: of each chunk."""
        times = [cost.times()[kind] for cost in costs for kind in KINDS]
        moved = [_latency(placement, costs, chunk, kind) for chunk in range(len(costs)) for kind in range(3)]
        _, exponent = math.frexp(micro_batches * (sum(times) + sum(moved)))
        unit = math.ldexp(1.0, exponent - RESOLUTION)
        whole = [round(time / unit) for time in times]
        work = [0] * (max(placement) + 1)
        for index, time in enumerate(whole):
            work[placement[index // 3]] += time
        return cls(placement, tuple(whole), tuple(round(time / unit) for time in moved), tuple(work), unit)


def _latency(placement: Sequence[int], costs: Sequence[ChunkCost], chunk: int, kind: int) -> float:
    taker = chunk + 1 if kind == FORWARD else chunk - 1
    if kind == WEIGHT_GRADIENT or not 0 <= taker < len(placement) or placement[taker] == placement[chunk]:
        return 0.0
    way = costs[min(chunk, taker)].way(kind == FORWARD)
    return way.send + way.time + way.receive


@dataclass(frozen=True)
class Filled:
    """Rows with weight gradients.

    Attributes:
        makespan, bubble: end of the last rank, and the longest wait of a rank between its first and last computation,
            if every receive were posted from the beginning; ticks.
    """

    rows: Rows
    makespan: int
    bubble: int

    def schedule(self, name: str, placement: tuple[int, ...], micro_batches: int) -> Schedule:
        """Actions of the rows, computing alone."""
        actions = []
        for rank, row in enumerate(self.rows):
            following = {
                stream(chunk, index): map(Action, repeat(chunk), repeat(kind), range(micro_batches)).__next__
                for chunk, home in enumerate(placement)
                if home == rank
                for index, kind in enumerate(KINDS)
            }
            actions.append(tuple([following[each]() for each in row]))
        return Schedule(name, placement, micro_batches, tuple(actions))


def fill(
    ticks: Ticks,
    micro_batches: int,
    order: Rows,
    limit: float,
    gap: float = 1.0,
    cutoff: tuple[float, float] = NO_CUTOFF,
) -> Filled | None:
    """Puts weight gradients into rows; None if these cannot keep the limit, or are no better than `cutoff`.

    Everything happens in the order of time: a heap holds the next computation of each rank, and a computation changes
    that for its own rank and for the rank that takes its result.

    Args:
        order: forwards and input gradients of each rank.
        limit: activations that a rank may hold, in whole stages' micro-batches.
        gap: a weight gradient is put where the rank would wait for at least this part of its time.
        cutoff: (makespan, bubble) in ticks; rows that take longer, or as long with such a bubble, are given up.
    """
    return _Run(ticks, micro_batches, order, limit, gap).finish(*cutoff)


class _Run:
    """State of all ranks while their rows are served in the order of time.

    Attributes:
        rows: streams served. free: end of the last one. left: rows still to serve, last first.
        steps: key of the next computation of each rank, -1 where there is none: (start, is a weight gradient, rank) in
            one number, since what happens first comes first.
        arrivals: times of the results that each stream has not used yet.
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
        """Finds the next computation of a rank, as far as it is known."""
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
                each = pending[rank].popleft()
                held[rank] -= 1
            else:
                each = left[rank].pop()
                arrivals[each].popleft()
                if each % 3 == FORWARD:
                    held[rank] += 1
                else:
                    pending[rank].append(each + 1)  # the weight gradient of an input gradient
            end = free[rank] = start + times[each]
            rows[rank].append(each)
            taker = takers[each]
            if taker >= 0:
                arrivals[taker].append(end + moved[each])
                other = home[taker // 3]
                if other != rank and left[other][-1] == taker and len(arrivals[taker]) == 1:
                    look(other)  # it may have waited for this
            look(rank)
        if sum(map(len, rows)) < self.total:
            return None
        return Filled(rows, max(free), max(bubble))
