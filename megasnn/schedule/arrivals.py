"""What a rank knows to have arrived: whoever sends it something has received all that it was to receive before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megasnn.schedule.actions import RECEIVES, SENDS, Action, Kind, Schedule


def known_arrivals(schedule: Schedule, rank: int) -> dict[Action, int]:
    """For each receive of a rank: how many of this rank's sends to the other one have arrived by then.

    They are the first ones, since what is first in is first out. Only the actions of ranks that it exchanges tensors
    with are looked at.
    """
    placement = schedule.placement
    known: dict[Action, int] = {}
    for peer in peers(placement, rank):
        arrived = 0
        for action in schedule.actions[peer]:
            if action.kind in RECEIVES:
                arrived += _sender(action, placement) == rank
            elif action.kind in SENDS and placement[action.peer.chunk] == rank:
                known[action.peer] = arrived
    return known


def peers(placement: Sequence[int], rank: int) -> list[int]:
    """The ranks that a rank exchanges tensors with, ascending: those of the chunks beside its own."""
    found = {other for pair in pairwise(placement) for other in pair if rank in pair}
    return sorted(found - {rank})


def _sender(receive: Action, placement: tuple[int, ...]) -> int:
    return placement[receive.chunk + (-1 if receive.kind is Kind.RECV_FORWARD else 1)]
