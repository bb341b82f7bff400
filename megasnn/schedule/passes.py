"""Transformations of a schedule: from computing alone to what an executor can run.

That communication is added by a pass, and not by the generators, is the idea of ``_add_send_recv`` in
``torch.distributed.pipelining``: a generator then says in what order to compute, and nothing else.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from megasnn.schedule.actions import Action, Kind, Schedule

Link = tuple[int, int, Kind]  # (sending rank, receiving rank, kind of the send)


def insert_transfers(schedule: Schedule) -> Schedule:
    """Adds a receive right before each computation that needs one and a send after each that has a taker.

    Neighbouring chunks on the same rank hand their tensors over without a transfer. Receives on a link are in
    the order of the sends: one whose turn comes before it is needed is received early.
    """
    surrounded = [[(action, *transfers_of(schedule, action)) for action in order] for order in schedule.actions]
    waiting: dict[Link, deque[Action]] = defaultdict(deque)  # receives, in the order of the sends
    for rank, order in enumerate(surrounded):
        for _, _, sent in order:
            for send in sent:
                receive = send.peer
                waiting[rank, schedule.placement[receive.chunk], send.kind].append(receive)
    actions = tuple(_with_transfers(rank, order, schedule, waiting) for rank, order in enumerate(surrounded))
    return replace(schedule, actions=actions)


def _with_transfers(
    rank: int,
    order: Sequence[tuple[Action, list[Action], list[Action]]],
    schedule: Schedule,
    waiting: dict[Link, deque[Action]],
) -> tuple[Action, ...]:
    result: list[Action] = []
    received: set[Action] = set()
    for action, needed, sent in order:
        for receive in needed:
            link = waiting.get((schedule.placement[receive.peer.chunk], rank, receive.peer.kind), deque())
            while link and receive not in received:
                early = link.popleft()
                received.add(early)
                result.append(early)
        result += [action, *sent]
    return tuple(result)


def transfers_of(schedule: Schedule, action: Action) -> tuple[list[Action], list[Action]]:
    """What is to be received before a computation and to be sent after it; nothing for any other action."""
    chunk, m = action.chunk, action.micro_batch
    previous, following = _lives_elsewhere(schedule, chunk, -1), _lives_elsewhere(schedule, chunk, +1)
    if action.kind is Kind.FORWARD:
        received, sent = (Kind.RECV_FORWARD, previous), (Kind.SEND_FORWARD, following)
    elif action.kind.propagates:
        received, sent = (Kind.RECV_BACKWARD, following), (Kind.SEND_BACKWARD, previous)
    else:
        return [], []
    return [Action(chunk, received[0], m)] * received[1], [Action(chunk, sent[0], m)] * sent[1]


def _lives_elsewhere(schedule: Schedule, chunk: int, step: int) -> bool:
    neighbour = chunk + step
    return 0 <= neighbour < schedule.chunks and schedule.placement[neighbour] != schedule.placement[chunk]


def insert_gradient_sync(schedule: Schedule) -> Schedule:
    """Adds a SYNC for each chunk after its last backward and the send that others wait for."""
    return replace(schedule, actions=tuple(_with_sync(order) for order in schedule.actions))


def _with_sync(order: tuple[Action, ...]) -> tuple[Action, ...]:
    last = {a.chunk: i for i, a in enumerate(order) if a.kind.finishes or a.kind is Kind.SEND_BACKWARD}
    chunk_ending_at = {index: chunk for chunk, index in last.items()}
    result: list[Action] = []
    for index, action in enumerate(order):
        result.append(action)
        if index in chunk_ending_at:
            result.append(Action(chunk_ending_at[index], Kind.SYNC_GRADIENTS))
    return tuple(result)
