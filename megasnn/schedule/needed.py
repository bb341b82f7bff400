"""What a rank has to have done before others can send to it."""

from __future__ import annotations

from megasnn.schedule.actions import RECEIVES, SENDS, Action, Schedule


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
