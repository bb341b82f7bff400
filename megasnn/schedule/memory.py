"""Activations and gathered weights that a rank holds, from the order of its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from megasnn.schedule.actions import FINISHING, Kind, Schedule


def activations_held(
    schedule: Schedule, rank: int, activation: Sequence[float] | None = None, entering: Sequence[float] | None = None
) -> list[float]:
    """Activations that a rank holds after each of its actions.

    Counted is what forwards keep for the backward: from a unit's forward on a micro-batch until the end of its whole
    backward, or of its weight gradient where the backward is split. An input gradient releases nothing. A forward that
    is computed again keeps its input until then. In evaluation a forward holds its own only while it runs. Not counted:
    tensors in transfer, gradients of activations, weights.

    Args:
        activation: of each unit for one micro-batch; when not given, a rank's units are equal parts of one stage, so
            that the figures are whole stages' micro-batches.
        entering: the input of each unit as it is kept; nothing when not given.
    """
    shares = activation if activation is not None else stage_shares(schedule.placement)
    if schedule.forward_only:
        return [shares[unit] if kind is Kind.FORWARD else 0.0 for unit, kind, _ in schedule.actions[rank]]
    kept = entering or [0.0] * schedule.units
    again = {(unit, m) for unit, kind, m in schedule.actions[rank] if kind is Kind.RECOMPUTE}
    held, result = 0.0, []
    for unit, kind, m in schedule.actions[rank]:
        if kind is Kind.FORWARD:
            held += kept[unit] if (unit, m) in again else shares[unit]
        elif kind is Kind.RECOMPUTE:
            held += shares[unit] - kept[unit]
        elif kind in FINISHING:
            held -= shares[unit]
        result.append(held)
    return result


def weights_held(schedule: Schedule, rank: int, unit_bytes: Sequence[int]) -> list[int]:
    """Bytes of gathered weights that a rank holds after each of its actions, those on their way included.

    Args:
        unit_bytes: of the gathered weights of each unit.
    """
    change = {Kind.UNSHARD: 1, Kind.RESHARD: -1}
    row = schedule.actions[rank]
    return list(accumulate(change.get(kind, 0) * unit_bytes[unit] for unit, kind, _ in row))


def stage_shares(placement: Sequence[int]) -> list[float]:
    """Part of its rank's stage that each unit is: one over the number of units on the rank."""
    units = Counter(placement)
    return [1 / units[rank] for rank in placement]
