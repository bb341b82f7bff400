"""Receives of a rank: what it posts before which of its actions, and what its peers have received by then.

Two rules say when a receive is posted. `posted_ahead` is for most steps: one receive of each link, while the rank
computes what comes before it. `sent_by_then` is for steps in which a device may wait for all that is queued on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from megasnn.schedule.actions import COMPUTE, PROPAGATING, RECEIVES, SENDS, Action, Kind, Schedule
from megasnn.schedule.validate import runs


def peers(placement: Sequence[int], rank: int) -> list[int]:
    """Ranks that a rank exchanges tensors with, ascending: those of the chunks beside its own."""
    found = {other for pair in pairwise(placement) for other in pair if rank in pair}
    return sorted(found - {rank})


def receives_from(schedule: Schedule, peer: int, rank: int) -> list[Action]:
    """Receives of what a peer sends to a rank, in the order of the sends."""
    sent = (action.peer for action in schedule.actions[peer] if action.kind in SENDS)
    return [receive for receive in sent if schedule.placement[receive.chunk] == rank]


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
                arrived += placement[action.peer.chunk] == rank
            elif action.kind in SENDS and placement[action.peer.chunk] == rank:
                known[action.peer] = arrived
    return known


def posted_ahead(schedule: Schedule, rank: int, wholes: Sequence[int]) -> dict[Action, list[Action]]:
    """Receives to post before a rank's computations: of each link the next one, if it is received right behind.

    Not earlier: a receive that is posted takes a part of a GPU until its data come. And not what can be sent only after
    that computation: whatever waits for the whole GPU in it (an allocator that frees memory) would wait for ever.

    Args:
        wholes: for each chunk, the number of the one that it is a unit of. Units of one forward, or of one backward,
            are one computation here.
    """
    row, needed = schedule.actions[rank], _needed_by_senders(schedule, rank)
    coming = {peer: deque(receives_from(schedule, peer, rank)) for peer in peers(schedule.placement, rank)}
    early, posted, found = set[Action](), set[Action](), dict[Action, list[Action]]()
    for position, action in enumerate(row):
        if action.kind in COMPUTE:
            for receive in received_behind(row, position, wholes):
                first = coming[schedule.placement[receive.peer.chunk]][0]
                if receive not in early and first not in posted and needed[first] <= position:
                    posted.add(first)
                    found.setdefault(action, []).append(first)
        elif action.kind in RECEIVES:
            while action not in early:
                early.add(coming[schedule.placement[action.peer.chunk]].popleft())
    return found


def received_behind(row: Sequence[Action], position: int, wholes: Sequence[int]) -> Iterator[Action]:
    """Receives between a computation and the next one that it does not belong together with."""
    chunk, kind, m = row[position]
    together = PROPAGATING | {Kind.RECOMPUTE}
    together = together if kind in together else frozenset({kind})
    for index in range(position + 1, len(row)):
        action = row[index]
        if action.kind in RECEIVES:
            yield action
        elif action.kind in COMPUTE and not (
            action.kind in together and wholes[action.chunk] == wholes[chunk] and action.micro_batch == m
        ):
            return


def _needed_by_senders(schedule: Schedule, rank: int) -> dict[Action, int]:
    """Number of a rank's own first actions that each of its receives' sends needs, be it over other ranks."""
    sent: dict[Action, int] = {}  # by the receive, what the send needs
    needed, own = [0] * schedule.ranks, 0
    for each, span in runs(schedule):
        for index in span:
            action = schedule.actions[each][index]
            if action.kind in RECEIVES:
                needed[each] = max(needed[each], sent[action])
            if each == rank:
                needed[each] = own = own + 1
            if action.kind in SENDS:
                sent[action.peer] = needed[each]
    return {action: sent[action] for action in schedule.actions[rank] if action.kind in RECEIVES}


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
            unposted[schedule.placement[receive.peer.chunk]] -= 1
        if each == rank and on_its_way[each]:
            found.setdefault(action, []).extend(on_its_way[each])
        on_its_way[each].clear()
        return action in sent if action.kind in RECEIVES else not unposted[each]

    for each, action in _in_turn(schedule, comes):
        if action.kind in SENDS:
            sent.add(action.peer)
            on_its_way[schedule.placement[action.peer.chunk]].append(action.peer)
            unposted[each] += 1
    return found


def _in_turn(schedule: Schedule, comes: Callable[[int, Action], bool]) -> Iterator[tuple[int, Action]]:
    """All actions, each with its rank: the ranks go on in turn, each as far as it can.

    Args:
        comes: tells whether a rank can do its next action; asked again in the next turn where it cannot.
    """
    places, goes_on = [0] * schedule.ranks, True
    while goes_on:
        goes_on = False
        for each, actions in enumerate(schedule.actions):
            while places[each] < len(actions) and comes(each, actions[places[each]]):
                yield each, actions[places[each]]
                places[each] += 1
                goes_on = True
