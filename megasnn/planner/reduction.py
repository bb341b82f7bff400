"""When the gradients of each pipeline rank are summed over its replicas, on a link beside the computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megasnn.schedule import Schedule, Simulation
from megasnn.schedule.actions import FINISHING

Pieces = Sequence[tuple[int, float]]
"""Gradients of a chunk in the order in which they are complete: bytes, and how far its last backward has come then."""


def reduction_ends(
    schedule: Schedule, simulation: Simulation, pieces: Sequence[Pieces], seconds: Callable[[int], float]
) -> list[float]:
    """Of each rank, when its last gradients are summed, or its last action is over.

    Chunks are reduced one after another, from the last one to the first, as `BucketedDataParallel` does.

    Args:
        pieces: of each chunk. seconds: of the link for so many bytes.
    """
    ends = []
    for rank, row in enumerate(simulation.timeline):
        last = {timed.action.chunk: timed for timed in row if timed.action.kind in FINISHING}
        free = 0.0
        for chunk in sorted(schedule.chunks_of(rank), reverse=True):
            for size, share in pieces[chunk]:
                begin, end = (last[chunk].start, last[chunk].end) if chunk in last else (0.0, 0.0)
                free = max(free, begin + share * (end - begin)) + seconds(size)
        ends.append(max([free, *(timed.end for timed in row[-1:])]))
    return ends
