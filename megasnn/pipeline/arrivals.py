"""Messages of a rank that have arrived, and what others need to send theirs, from the order of actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from megasnn.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule


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
    needed, own = [0] * schedule.ranks, 0
    for each, action in _worked_off(schedule, lambda each, action: action.kind not in RECEIVES or action in sent):
        if action.kind in RECEIVES:
            needed[each] = max(needed[each], sent[action])
        if each == rank:
            needed[each] = own = own + 1
        if action.kind in SENDS:
            sent[action.peer] = needed[each]
    return {action: sent[action] for action in schedule.actions[rank] if action.kind in RECEIVES}


def sent_by_then(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """For a rank's computations and receives: the receives that it posts before them, which were sent for certain by
    then. With these, no ranks wait for each other for ever where computations wait for all that is on its way from and
    to their rank, however fast each of them is.

    All ranks are followed in one order. A rank posts what is on its way to it before it goes on: then nobody waits for
    that who does not compute, and nothing is posted whose sender may wait for this rank. In the order a computation
    comes when all that its rank has sent is posted, so that nobody is far ahead, and few receives need room at once.
    The schedule is valid.
    """
    on_its_way: list[list[Action]] = [[] for _ in schedule.actions]  # to a rank, and not posted there
    unposted = [0] * schedule.ranks  # how many of a rank's sends
    sent, found = set[Action](), dict[Action, list[Action]]()

    def comes(each: int, action: Action) -> bool:
        if action.kind not in COMPUTE | RECEIVES:
            return True
        for receive in on_its_way[each]:
            unposted[schedule.placement[receive.peer.chunk]] -= 1
        if each == rank and on_its_way[each]:
            found.setdefault(action, []).extend(on_its_way[each])
        on_its_way[each].clear()
        return action in sent if action.kind in RECEIVES else not unposted[each]

    for each, action in _worked_off(schedule, comes):
        if action.kind in SENDS:
            sent.add(action.peer)
            on_its_way[schedule.placement[action.peer.chunk]].append(action.peer)
            unposted[each] += 1
    return found


def _worked_off(schedule: Schedule, comes: Callable[[int, Action], bool]) -> Iterator[tuple[int, Action]]:
    """All actions that come, each with its rank: the ranks go on in turn, each as far as it can.

    Args:
        comes: whether a rank can do its next action; asked again in the next turn where it cannot.
    """
    places, goes_on = [0] * schedule.ranks, True
    while goes_on:
        goes_on = False
        for each, actions in enumerate(schedule.actions):
            while places[each] < len(actions) and comes(each, actions[places[each]]):
                yield each, actions[places[each]]
                places[each] += 1
                goes_on = True


def peers(placement: Sequence[int], rank: int) -> list[int]:
    """Ranks that a rank exchanges tensors with, ascending: those of the chunks beside its own."""
    found = {other for pair in pairwise(placement) for other in pair if rank in pair}
    return sorted(found - {rank})


def _sender(receive: Action, placement: tuple[int, ...]) -> int:
    return placement[receive.chunk + (-1 if receive.kind is Kind.RECV_FORWARD else 1)]
