"""When a rank posts each receive, and how many messages have arrived by then.

A receive is posted early only if its message was certainly sent: loading kernels, allocating memory and capturing CUDA
graphs may wait for all work queued on the device, receives included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from megasnn.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Schedule


def peers(placement: Sequence[int], rank: int) -> list[int]:
    """Ranks that exchange tensors with a rank, ascending."""
    found: set[int] = set()
    for pair in pairwise(placement):
        if rank in pair:
            found.update(pair)
    return sorted(found - {rank})


def known_arrivals(schedule: Schedule, rank: int) -> dict[Action, int]:
    """For each receive on a rank: how many sends to the same peer have arrived by then."""
    placement = schedule.placement
    known: dict[Action, int] = {}
    for peer in peers(placement, rank):
        arrived = 0
        for action in schedule.actions[peer]:
            if action.kind in RECEIVES and placement[action.peer.segment] == rank:
                arrived += 1
            elif action.kind in SENDS and placement[action.peer.segment] == rank:
                # The peer has finished every receive before this send.
                known[action.peer] = arrived
    return known


def sent_by_then(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """Receives to post before each computation and receive; their messages were certainly sent."""
    # Otherwise transfers that are queued on a device would deadlock, at some relative speed of the ranks.
    in_flight: list[list[Action]] = [[] for _ in schedule.actions]  # by receiving rank, receives not posted yet
    unposted = [0] * schedule.ranks  # by sending rank, the number of its sends among them
    sent: set[Action] = set()
    found: dict[Action, list[Action]] = {}

    def can_run(each: int, action: Action) -> bool:
        if action.kind not in COMPUTE and action.kind not in RECEIVES:
            return True
        # All messages in flight are posted before the next computation or receive. An unposted send would block its
        # sender as a receive without its send blocks the receiver.
        for receive in in_flight[each]:
            unposted[schedule.placement[receive.peer.segment]] -= 1
        if each == rank and in_flight[each]:
            found.setdefault(action, []).extend(in_flight[each])
        in_flight[each].clear()
        if action.kind in RECEIVES:
            return action in sent
        # A rank computes once all its sends are posted: none runs far ahead, and few receives hold memory at once.
        return not unposted[each]

    for each, action in _in_turn(schedule, can_run):
        if action.kind in SENDS:
            receive = action.peer
            sent.add(receive)
            in_flight[schedule.placement[receive.segment]].append(receive)
            unposted[each] += 1
    return found


def _in_turn(schedule: Schedule, can_run: Callable[[int, Action], bool]) -> Iterator[tuple[int, Action]]:
    """All actions with their ranks; the ranks take turns, and each runs as far as it can.

    Args:
        can_run: (rank, its next action); if False, asked again in the next round.
    """
    positions = [0] * schedule.ranks
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.actions):
            while positions[rank] < len(actions) and can_run(rank, actions[positions[rank]]):
                yield rank, actions[positions[rank]]
                positions[rank] += 1
                progress = True
