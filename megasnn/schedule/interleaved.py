"""Several chunks on each rank, placed in a loop (arXiv 2104.04473)."""

from __future__ import annotations

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.basic import one_f_one_b
from megasnn.schedule.partition import loop_placement


def interleaved(stages: int, micro_batches: int, chunks_per_rank: int = 2) -> Schedule:
    """1F1B over chunks: the bubble shrinks by the number of chunks, the first rank holds more activations.

    Micro-batches go round the loop in groups as large as the pipeline. Where the last group is not full, the
    order is that of a full one less what is not there, which leaves every dependency as it was. One chunk a
    rank is 1F1B.
    """
    if chunks_per_rank == 1:
        plain = one_f_one_b(stages, micro_batches)
        return Schedule("interleaved", plain.placement, micro_batches, plain.actions)
    rows = tuple(_row(rank, stages, micro_batches, chunks_per_rank) for rank in range(stages))
    return Schedule("interleaved", loop_placement(stages, chunks_per_rank), micro_batches, rows)


def _row(rank: int, stages: int, micro_batches: int, chunks_per_rank: int) -> tuple[Action, ...]:
    groups = range(0, micro_batches, stages)
    rounds = [(local, m) for first in groups for local in range(chunks_per_rank) for m in range(first, first + stages)]
    forwards = [Action(local * stages + rank, Kind.FORWARD, m) for local, m in rounds]
    backwards = [Action((chunks_per_rank - 1 - local) * stages + rank, Kind.BACKWARD, m) for local, m in rounds]
    warm_up = min(2 * (stages - rank - 1) + (chunks_per_rank - 1) * stages, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    order += backwards[len(forwards) - warm_up :]
    return tuple(action for action in order if action.micro_batch is not None and action.micro_batch < micro_batches)
