"""Schedules whose order does not depend on costs, and evaluation, as computing alone; `passes` adds the rest.

Letters of the papers: p stages, m micro-batches, v chunks on each rank; T_F, T_B and T_W are the times of a stage's
forward F, input gradient B and weight gradient W for one micro-batch, and M_B is what its forward keeps. Here B is
written I where the backward is split. Each function is a whole schedule. Micro-batches run backward in ascending order
in all of them, so gradients are accumulated in the same order and every schedule gives the same bits.
"""

from __future__ import annotations

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.partition import loop_placement


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965).

    Time (m + p - 1)(T_F + T_B + T_W); peak activations m M_B on every rank.
    """
    actions = tuple(
        tuple(
            [Action(stage, Kind.FORWARD, m) for m in range(micro_batches)]
            + [Action(stage, Kind.BACKWARD, m) for m in range(micro_batches)]
        )
        for stage in range(stages)
    )
    return Schedule("gpipe", tuple(range(stages)), micro_batches, actions)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """Warm-up of p - r - 1 forwards, then one forward and one backward in turn (PipeDream-flush, arXiv 2006.09503).

    Time as of GPipe; peak activations min(p - r, m) M_B on rank r.
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
    """1F1B over v chunks on each rank, placed in a loop (arXiv 2104.04473).

    Bubble (p - 1)(T_F + T_B + T_W) / v; peak activations p M_B (1 + (p - 1) / (p v)), after a warm-up of 2 (p - r - 1)
    + (v - 1) p forwards. Micro-batches go round the loop in groups of p. Where the last group is not full, the order is
    that of a full one without what is missing, which keeps every dependency. One chunk a rank is 1F1B.
    """
    if chunks_per_rank == 1:
        plain = one_f_one_b(stages, micro_batches)
        return Schedule("interleaved", plain.placement, micro_batches, plain.actions)
    rows = tuple(_interleaved_row(rank, stages, micro_batches, chunks_per_rank) for rank in range(stages))
    return Schedule("interleaved", loop_placement(stages, chunks_per_rank), micro_batches, rows)


def _interleaved_row(rank: int, stages: int, micro_batches: int, chunks_per_rank: int) -> tuple[Action, ...]:
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
    """Evaluation on any placement: a rank takes the ready chunk that is nearest to the end."""
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
