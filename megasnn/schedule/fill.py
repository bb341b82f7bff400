"""Places weight gradients (W) where a rank would wait: the mechanism of all zero-bubble schedules.

Forwards and input gradients have a fixed order per rank. Weight gradients run in gaps, and when a rank needs memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from megasnn.schedule.actions import Action, Kind, Schedule, crosses
from megasnn.schedule.costs import ChunkCost

FORWARD = Kind.FORWARD
INPUT_GRADIENT = Kind.INPUT_GRADIENT
WEIGHT_GRADIENT = Kind.WEIGHT_GRADIENT
RESOLUTION = 50  # bits of the longest possible time
ROUNDING = 1e-9
NEARLY = 1 - 1e-7  # a gap counts as long enough in spite of the rounding to whole ticks
NO_CUTOFF = (math.inf, 0.0)
NOT_KNOWN = -1


@dataclass(frozen=True)
class Ticks:
    """Chunk costs on a placement, in whole ticks."""

    placement: tuple[int, ...]  # each chunk's rank
    times: dict[Kind, list[int]]  # by kind, each chunk's time to compute
    moved: dict[Kind, list[int]]  # by kind, each chunk's time to send its result
    work: list[int]  # each rank's time per micro-batch
    duration: float  # of a tick

    @classmethod
    def of(cls, placement: tuple[int, ...], costs: Sequence[ChunkCost], micro_batches: int) -> Ticks:
        """Ticks as fine as the total time of `micro_batches` allows."""
        times: dict[Kind, list[float]] = {FORWARD: [], INPUT_GRADIENT: [], WEIGHT_GRADIENT: []}
        moved: dict[Kind, list[float]] = {FORWARD: [], INPUT_GRADIENT: []}
        for chunk, cost in enumerate(costs):
            times[FORWARD].append(cost.forward)
            times[INPUT_GRADIENT].append(cost.input_gradient)
            times[WEIGHT_GRADIENT].append(cost.weight_gradient)
            moved[FORWARD].append(cost.transfer if crosses(placement, chunk) else 0.0)
            moved[INPUT_GRADIENT].append(costs[chunk - 1].transfer_back if crosses(placement, chunk - 1) else 0.0)
        longest = micro_batches * (sum(map(sum, times.values())) + sum(map(sum, moved.values())))
        # Whole ticks add without rounding in any order, and a power of two keeps the division exact.
        _, exponent = math.frexp(longest)
        duration = math.ldexp(1.0, exponent - RESOLUTION)
        times_in_ticks = _in_ticks(times, duration)
        work = [0] * (max(placement) + 1)
        for chunk, rank in enumerate(placement):
            work[rank] += sum(of_chunks[chunk] for of_chunks in times_in_ticks.values())
        return cls(placement, times_in_ticks, _in_ticks(moved, duration), work, duration)


def _in_ticks(times: dict[Kind, list[float]], duration: float) -> dict[Kind, list[int]]:
    ticks = {}
    for kind, of_chunks in times.items():
        ticks[kind] = [round(time / duration) for time in of_chunks]
    return ticks


@dataclass(frozen=True)
class Filled:
    """Schedule with weight gradients; times in ticks."""

    schedule: Schedule
    makespan: int
    bubble: int  # a rank's longest wait between its first and last computation


def fill(
    ticks: Ticks, order: Schedule, limit: float, gap: float = 1.0, cutoff: tuple[float, float] = NO_CUTOFF
) -> Filled | None:
    """Places weight gradients; None if the order exceeds the limit, or is no better than `cutoff`.

    Args:
        order: forwards and input gradients.
        limit: activations a rank may hold, in whole-stage micro-batches.
        gap: a weight gradient fills waits from this fraction of its time on.
        cutoff: (makespan, bubble) in ticks; an order must be faster, or as fast with a smaller bubble.
    """
    return _Filling(ticks, order, limit, gap).run(*cutoff)


class _Filling:
    """Event simulation over all ranks; lists have one entry per rank."""

    def __init__(self, ticks: Ticks, order: Schedule, limit: float, gap: float) -> None:
        ranks = order.ranks
        chunks = order.segments
        self.ticks = ticks
        self.order = order
        self.ranks = ranks
        self.done: list[list[Action]] = []  # actions done
        self.remaining: list[list[Action]] = []  # actions to do, the next one last
        self.capacity: list[int] = []  # limit on `resident`
        self.pending: list[deque[Action]] = []  # weight gradients that can run
        for rank, actions in enumerate(order.actions):
            self.done.append([])
            self.remaining.append([*reversed(actions)])
            self.capacity.append(math.floor(limit * ticks.placement.count(rank) + ROUNDING))
            self.pending.append(deque())
        self.free_at = [0] * ranks  # end of the last action
        self.waited = [0] * ranks  # in all
        self.bubble = [0] * ranks  # total wait since the first computation
        self.resident = [0] * ranks  # activations held, in chunk micro-batches
        # By kind and chunk, when unused inputs arrive.
        self.arrivals: dict[Kind, list[deque[int]]] = {
            FORWARD: [deque() for _ in range(chunks)],
            INPUT_GRADIENT: [deque() for _ in range(chunks)],
        }
        # The first chunk's inputs are there from the start.
        self.arrivals[FORWARD][0].extend([0] * order.micro_batches)
        # By kind and chunk, the (chunk, kind) that uses its result; None at the end.
        self.takers: dict[Kind, list[tuple[int, Kind] | None]] = {FORWARD: [], INPUT_GRADIENT: [None]}
        for chunk in range(chunks - 1):
            self.takers[FORWARD].append((chunk + 1, FORWARD))
            self.takers[INPUT_GRADIENT].append((chunk, INPUT_GRADIENT))
        # The loss turns round: the last chunk's output is used by its own backward.
        self.takers[FORWARD].append((chunks - 1, INPUT_GRADIENT))
        # By chunk, the shortest wait that its weight gradient fills.
        self.gaps = [math.ceil(gap * NEARLY * time) for time in ticks.times[WEIGHT_GRADIENT]]
        # Each rank's next computation, on the heap too (see `find_next`); NOT_KNOWN until its input arrives. A heap
        # compares integers faster than tuples.
        self.steps = [NOT_KNOWN] * ranks
        self.heap: list[int] = []

    def run(self, longest: float, widest: float) -> Filled | None:
        """None if the orders block or miss the cutoff."""
        ranks = self.ranks
        micro_batches = self.order.micro_batches
        work = [micro_batches * time for time in self.ticks.work]
        for rank in range(ranks):
            self.find_next(rank)
        while self.heap:
            step = heappop(self.heap)
            start_and_kind, rank = divmod(step, ranks)
            if step != self.steps[rank]:
                # Outdated: an input has arrived since, and changed the rank's next computation.
                continue
            start, is_weight_gradient = divmod(start_and_kind, 2)
            wait = start - self.free_at[rank]
            if wait > 0:
                self.waited[rank] += wait
                if self.done[rank]:
                    self.bubble[rank] += wait
                # A rank never catches up on a wait: this bounds the makespan from below.
                least = self.waited[rank] + work[rank]
                if least > longest or (least == longest and self.bubble[rank] >= widest):
                    return None
            action = self.pending[rank].popleft() if is_weight_gradient else self.remaining[rank].pop()
            self.compute(rank, action, start)
        # Orders block where the limit lets no rank go on.
        if sum(map(len, self.done)) < 3 * self.order.segments * micro_batches:
            return None
        schedule = replace(self.order, actions=tuple(map(tuple, self.done)))
        return Filled(schedule, max(self.free_at), max(self.bubble))

    def find_next(self, rank: int) -> None:
        """Puts the next computation on the heap, if it is known.

        A computation is one integer, (2 * start + is it a weight gradient) * ranks + rank: the earliest start comes
        first, then forwards and input gradients, then the lowest rank.
        """
        now = self.free_at[rank]
        remaining = self.remaining[rank]
        start = NOT_KNOWN
        if remaining:
            chunk, kind, _ = remaining[-1]
            arrived = self.arrivals[kind][chunk]
            # Only a forward takes memory. At the limit it waits until a weight gradient has freed some.
            if arrived and (kind is not FORWARD or self.resident[rank] < self.capacity[rank]):
                start = max(arrived[0], now)
        pending = self.pending[rank]
        # A weight gradient runs at once where nothing else is known, or where the wait is long enough.
        if pending and (start == NOT_KNOWN or start - now >= max(1, self.gaps[pending[0][0]])):
            step = (2 * now + 1) * self.ranks + rank
        elif start != NOT_KNOWN:
            step = 2 * start * self.ranks + rank
        else:
            step = NOT_KNOWN
        if step != self.steps[rank] and step != NOT_KNOWN:
            heappush(self.heap, step)
        self.steps[rank] = step

    def compute(self, rank: int, action: Action, start: int) -> None:
        """Notes a computation and its result's arrival; finds the next computation of both ranks."""
        chunk, kind, m = action
        end = start + self.ticks.times[kind][chunk]
        self.free_at[rank] = end
        self.done[rank].append(action)
        self.steps[rank] = NOT_KNOWN
        if kind is WEIGHT_GRADIENT:
            self.resident[rank] -= 1
        else:
            self.arrivals[kind][chunk].popleft()
            if kind is FORWARD:
                self.resident[rank] += 1
            else:
                self.pending[rank].append(Action(chunk, WEIGHT_GRADIENT, m))
            self.deliver(rank, chunk, kind, end)
        self.find_next(rank)

    def deliver(self, rank: int, chunk: int, kind: Kind, end: int) -> None:
        """Sends a result to the computation that uses it."""
        taker = self.takers[kind][chunk]
        if taker is None:
            return
        taker_chunk, taker_kind = taker
        arrived = self.arrivals[taker_kind][taker_chunk]
        arrived.append(end + self.ticks.moved[kind][chunk])
        receiver = self.ticks.placement[taker_chunk]
        remaining = self.remaining[receiver]
        # Only another rank that has been waiting for this very input needs another look.
        if receiver != rank and len(arrived) == 1 and remaining and remaining[-1][:2] == taker:
            self.find_next(receiver)
