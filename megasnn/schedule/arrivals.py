"""What a rank knows to have arrived: whoever sends it something has received all that it was to receive before."""

from __future__ import annotations

from megasnn.schedule.actions import RECEIVES, SENDS, Action, Kind, Schedule


def known_arrivals(schedule: Schedule, rank: int) -> dict[Action, int]:
    """For each receive of a rank: how many of this rank's sends to the other one have arrived by then.

    They are the first ones, since what is first in is first out.
    """
    placement = schedule.placement
    known: dict[Action, int] = {}
    for peer in {*range(schedule.ranks)} - {rank}:
        arrived = 0
        for action in schedule.actions[peer]:
            if action.kind in RECEIVES:
                arrived += _sender(action, placement) == rank
            elif action.kind in SENDS and placement[action.peer.chunk] == rank:
                known[action.peer] = arrived
    return known


def _sender(receive: Action, placement: tuple[int, ...]) -> int:
    return placement[receive.chunk + (-1 if receive.kind is Kind.RECV_FORWARD else 1)]
