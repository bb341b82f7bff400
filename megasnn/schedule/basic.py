"""Schedules whose order is known beforehand, and evaluation, as computing alone; `passes` adds the rest.

Each function is a whole schedule. Micro-batches run backward in ascending order in all of them, so
gradients are accumulated in the same order and every schedule gives the same bits.
"""

from __future__ import annotations

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.partition import loop_placement


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965). Holds the activations of every micro-batch."""
    actions = tuple(
        tuple(
            [Action(stage, Kind.FORWARD, m) for m in range(micro_batches)]
            + [Action(stage, Kind.BACKWARD, m) for m in range(micro_batches)]
        )
        for stage in range(stages)
    )
    return Schedule("gpipe", tuple(range(stages)), micro_batches, actions)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """Warm-up forwards, then one forward and one backward in turn (PipeDream-flush, arXiv 2006.09503).

    As fast as GPipe, but stage s holds the activations of min(stages - s, micro_batches) micro-batches only.
    """
    actions = []
    for stage in range(stages):
        warm_up = min(stages - stage - 1, micro_batches)
        steady = micro_batches - warm_up
        order = [Action(stage, Kind.FORWARD, m) for m in range(warm_up)]
        for m in range(steady):
            order.append(Action(stage, Kind.FORWARD, warm_up + m))
            order.append(Action(stage, Kind.BACKWARD, m))
        order += [Action(stage, Kind.BACKWARD, m) for m in range(steady, micro_batches)]
        actions.append(tuple(order))
    return Schedule("1f1b", tuple(range(stages)), micro_batches, tuple(actions))


def interleaved(stages: int, micro_batches: int, chunks_per_rank: int = 2) -> Schedule:
    """1F1B over chunks placed in a loop (arXiv 2104.04473): the bubble shrinks by the number of chunks, and the
    first rank holds more activations.

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


def forward_only(placement: tuple[int, ...], micro_batches: int) -> Schedule:
    """Evaluation on any placement: a rank takes what is ready, the chunk nearest to the end first."""
    chunks = len(placement)
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    done = [0] * chunks  # micro-batches that each chunk has computed
    while done[-1] < micro_batches:
        ready = {placement[c]: c for c in range(chunks) if done[c] < (done[c - 1] if c else micro_batches)}
        for rank, chunk in ready.items():
            rows[rank].append(Action(chunk, Kind.FORWARD, done[chunk]))
        for chunk in ready.values():
            done[chunk] += 1
    return Schedule("forward", placement, micro_batches, tuple(map(tuple, rows)), forward_only=True)
