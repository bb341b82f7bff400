"""A search's short form of schedules: which stream a rank serves next, and costs as whole numbers.

A stream is all computations of one kind by one chunk, on ascending micro-batches: stream 3c + k is the forward (k = 0),
the input gradient (1) or the weight gradient (2) of chunk c. The n-th time that a stream stands in a rank's row is its
n-th micro-batch, so a row is a list of small numbers, and repeating a pattern repeats numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.costs import ChunkCost

Rows = Sequence[Sequence[int]]  # the streams of each rank, in order
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)
KINDS = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
RESOLUTION = 50  # bits of the longest time there can be


def stream(chunk: int, kind: int) -> int:
    """The number of a stream; `kind` is FORWARD, INPUT_GRADIENT or WEIGHT_GRADIENT."""
    return 3 * chunk + kind


@dataclass(frozen=True)
class Ticks:
    """The costs of a placement's streams, in whole ticks.

    Whole numbers add without rounding: what is equally long takes equally many ticks in whichever order it is added up.

    Attributes:
        placement: the rank of each chunk.
        times: of each stream.
        moved: from the end of each stream's computing until its result can be used by the stream that waits for it.
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
        """As fine as the sum of all that `micro_batches` could take allows.

        Args:
            costs: of each chunk.
        """
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


def takers_of(chunks: int) -> list[int]:
    """For each stream the one that needs its result; -1 for none."""
    takers = [-1] * (3 * chunks)
    for chunk in range(chunks):
        turn = 3 * chunk + INPUT_GRADIENT
        takers[3 * chunk + FORWARD] = 3 * (chunk + 1) + FORWARD if chunk + 1 < chunks else turn
        takers[turn] = turn - 3 if chunk else -1
    return takers


def as_schedule(name: str, placement: tuple[int, ...], micro_batches: int, rows: Rows) -> Schedule:
    """The actions of rows in which every stream is as long as there are micro-batches; computing alone."""
    actions = []
    for rank, row in enumerate(rows):
        chunks = [chunk for chunk, home in enumerate(placement) if home == rank]
        following = {
            stream(chunk, index): map(Action, repeat(chunk), repeat(kind), range(micro_batches)).__next__
            for chunk in chunks
            for index, kind in enumerate(KINDS)
        }
        actions.append(tuple([following[each]() for each in row]))
    return Schedule(name, placement, micro_batches, tuple(actions))
