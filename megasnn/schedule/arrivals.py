"""What the order of actions says of a rank's messages: which have arrived, and what others need to send theirs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megasnn.schedule.actions import RECEIVES, SENDS, Action, Kind, Schedule


def known_arrivals(schedule: Schedule, rank: int) -> dict[Action, int]:
    """For each receive of a rank: how many of this rank's sends to the other one have arrived by then, since whoever
    sends something has received all that it was to receive before.

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


def needed_by_senders(schedule: Schedule, rank: int) -> dict[Action, int]:
    """For each receive of a rank: how many of the rank's own actions its send needs, the first ones of them, be it over
    other ranks. An action needs what its rank does before it, and a receive its send.

    The schedule is valid: all of it is worked off here, as the ranks would do it.
    """
    sent: dict[Action, int] = {}  # by the receive, what the send needs
    places, needed = [0] * schedule.ranks, [0] * schedule.ranks
    goes_on = True
    while goes_on:
        goes_on = False
        for each, actions in enumerate(schedule.actions):
            while places[each] < len(actions):
                action = actions[places[each]]
                if action.kind in RECEIVES:
                    if action not in sent:
                        break
                    needed[each] = max(needed[each], sent[action])
                places[each] += 1
                goes_on = True
                if each == rank:
                    needed[each] = places[each]
                if action.kind in SENDS:
                    sent[action.peer] = needed[each]
    return {action: sent[action] for action in schedule.actions[rank] if action.kind in RECEIVES}


def peers(placement: Sequence[int], rank: int) -> list[int]:
    """The ranks that a rank exchanges tensors with, ascending: those of the chunks beside its own."""
    found = {other for pair in pairwise(placement) for other in pair if rank in pair}
    return sorted(found - {rank})


def _sender(receive: Action, placement: tuple[int, ...]) -> int:
    return placement[receive.chunk + (-1 if receive.kind is Kind.RECV_FORWARD else 1)]
