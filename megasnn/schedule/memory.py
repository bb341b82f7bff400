"""How many activations a rank holds, from the order of its actions alone."""

from __future__ import annotations

from collections.abc import Sequence

from megasnn.schedule.actions import Kind, Schedule


def activations_held(schedule: Schedule, rank: int, activation: Sequence[float] | None = None) -> list[float]:
    """What a rank holds after each of its actions.

    Counted is what forwards leave for the backward: from a chunk's forward on a micro-batch until the end of
    its whole backward, or of its weight gradient where the backward is split. An input gradient releases
    nothing. In evaluation a forward holds its own only while it runs. Not counted: tensors in transfer,
    gradients of activations, weights.

    Args:
        activation: of each chunk for one micro-batch; when not given, a rank's chunks are equal parts of one
            stage, so that the figures are whole stages' micro-batches.
    """
    shares = activation if activation is not None else stage_shares(schedule.placement)
    held, result = 0.0, []
    for action in schedule.actions[rank]:
        if action.kind is Kind.FORWARD and not schedule.forward_only:
            held += shares[action.chunk]
        elif action.kind.finishes:
            held -= shares[action.chunk]
        running = action.kind is Kind.FORWARD and schedule.forward_only
        result.append(shares[action.chunk] if running else held)
    return result


def stage_shares(placement: Sequence[int]) -> list[float]:
    """The part of its rank's stage that each chunk is: one over the number of chunks on the rank."""
    return [1 / placement.count(rank) for rank in placement]
