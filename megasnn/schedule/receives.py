"""Receives of a rank: what it posts before which of its actions, and what its peers have received by then.

A device may wait for all that is queued on it: when kernels are loaded, memory is taken, or CUDA graphs are captured.
So only receives are posted early whose messages were sent for certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from megasnn.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Schedule


def peers(placement: Sequence[int], rank: int) -> list[int]:
    """Ranks that a rank exchanges tensors with, ascending: those of the chunks beside its own."""
    found = {other for pair in pairwise(placement) for other in pair if rank in pair}
    return sorted(found - {rank})


def known_arrivals(schedule: Schedule, rank: int) -> dict[Action, int]:
    """Number of a rank's sends to a peer that have arrived by then, for each receive from that peer.

    Whoever sends something has received all that it was to receive before. Only actions of peers are looked at.
    """
    placement = schedule.placement
    known: dict[Action, int] = {}
    for peer in peers(placement, rank):
        arrived = 0
        for action in schedule.actions[peer]:
            if action.kind in RECEIVES:
                arrived += placement[action.peer.segment] == rank
            elif action.kind in SENDS and placement[action.peer.segment] == rank:
                known[action.peer] = arrived
    return known


def sent_by_then(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """Receives to post before a rank's computations and receives, whose messages were sent for certain by then.

    With these, no ranks wait for each other for ever where computations wait for all that is on its way from and to
    their rank, however fast each of them is. A send that nobody receives holds its sender up there just as a receive
    does that nobody sends.

    All ranks are followed in one order. A rank posts what is on its way to it before it goes on: then nobody waits for
    that who does not compute, and nothing is posted whose sender may wait for this rank. A computation comes when all
    that its rank has sent is posted, so that nobody is far ahead, and few receives need memory at once.
    """
    on_its_way: list[list[Action]] = [[] for _ in schedule.actions]  # to a rank, and not posted there
    unposted = [0] * schedule.ranks  # how many of a rank's sends
    sent, found = set[Action](), dict[Action, list[Action]]()

    def comes(each: int, action: Action) -> bool:
        if action.kind not in COMPUTE | RECEIVES:
            return True
        for receive in on_its_way[each]:
            unposted[schedule.placement[receive.peer.segment]] -= 1
        if each == rank and on_its_way[each]:
            found.setdefault(action, []).extend(on_its_way[each])
        on_its_way[each].clear()
        return action in sent if action.kind in RECEIVES else not unposted[each]

    for each, action in _in_turn(schedule, comes):
        if action.kind in SENDS:
            sent.add(action.peer)
            on_its_way[schedule.placement[action.peer.segment]].append(action.peer)
            unposted[each] += 1
    return found


def _in_turn(schedule: Schedule, comes: Callable[[int, Action], bool]) -> Iterator[tuple[int, Action]]:
    """All actions, each with its rank: the ranks go on in turn, each as far as it can.

    Args:
        comes: tells whether a rank can do its next action; asked again in the next turn where it cannot.
    """
    positions, goes_on = [0] * schedule.ranks, True
    while goes_on:
        goes_on = False
        for each, actions in enumerate(schedule.actions):
            while positions[each] < len(actions) and comes(each, actions[positions[each]]):
                yield each, actions[positions[each]]
                positions[each] += 1
                goes_on = True
