"""Transformations of a schedule: from computing alone to what an executor can run.

That communication is added by a pass, and not by the generators, is the idea of ``_add_send_recv`` in
``torch.distributed.pipelining``: a generator then says in what order to compute, and nothing else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from megasnn.schedule.actions import FINISHING, PROPAGATING, Action, Kind, Schedule


@dataclass(frozen=True)
class Boundaries:
    """Which chunks exchange tensors with a neighbour on another rank.

    Attributes:
        before, after: for each chunk, whether its predecessor, its successor, exists and lives elsewhere.
    """

    before: tuple[bool, ...]
    after: tuple[bool, ...]

    @classmethod
    def of(cls, placement: tuple[int, ...]) -> Boundaries:
        crossed = [a != b for a, b in zip(placement, placement[1:], strict=False)]
        return cls((False, *crossed), (*crossed, False))


def insert_transfers(schedule: Schedule) -> Schedule:
    """Adds a receive right before each computation that needs one and a send after each that has a taker.

    Neighbouring chunks on the same rank hand their tensors over without a transfer. Receives on a link are in
    the order of the sends: one whose turn comes before it is needed is received early.
    """
    boundaries = Boundaries.of(schedule.placement)
    inputs, gradients = links = _links(schedule.placement)
    for order in schedule.actions:
        for chunk, kind, m in order:
            if kind is Kind.FORWARD:
                if boundaries.after[chunk]:
                    inputs[chunk + 1].append(Action(chunk + 1, Kind.RECV_FORWARD, m))
            elif kind in PROPAGATING and boundaries.before[chunk]:
                gradients[chunk - 1].append(Action(chunk - 1, Kind.RECV_BACKWARD, m))
    return replace(schedule, actions=tuple(_with_transfers(order, boundaries, *links) for order in schedule.actions))


def _links(placement: tuple[int, ...]) -> tuple[list[deque[Action]], list[deque[Action]]]:
    """For each chunk, the receives to come on the link of its input, and of the gradient of its output.

    Chunks that share a link share its receives.
    """
    ahead: dict[tuple[int, int], deque[Action]] = {}
    back: dict[tuple[int, int], deque[Action]] = {}
    pairs = [(placement[chunk - 1], rank) for chunk, rank in enumerate(placement)]  # the first one crosses nothing
    return [ahead.setdefault(pair, deque()) for pair in pairs], [
        back.setdefault(pair, deque()) for pair in (*pairs[1:], pairs[0])
    ]


def _with_transfers(
    order: tuple[Action, ...], boundaries: Boundaries, inputs: list[deque[Action]], gradients: list[deque[Action]]
) -> tuple[Action, ...]:
    before, after = boundaries.before, boundaries.after
    result: list[Action] = []
    early: set[Action] = set()
    for action in order:
        chunk, kind, m = action
        if kind is Kind.FORWARD:
            if before[chunk]:
                _receive(Action(chunk, Kind.RECV_FORWARD, m), inputs[chunk], early, result)
            result.append(action)
            if after[chunk]:
                result.append(Action(chunk, Kind.SEND_FORWARD, m))
        elif kind in PROPAGATING:
            if after[chunk]:
                _receive(Action(chunk, Kind.RECV_BACKWARD, m), gradients[chunk], early, result)
            result.append(action)
            if before[chunk]:
                result.append(Action(chunk, Kind.SEND_BACKWARD, m))
        else:
            result.append(action)
    return tuple(result)


def _receive(needed: Action, link: deque[Action], early: set[Action], result: list[Action]) -> None:
    """Receives all that comes before what is needed, unless that was received early itself."""
    if needed in early:
        return
    while link:
        following = link.popleft()
        result.append(following)
        if following == needed:
            return
        early.add(following)


def insert_gradient_sync(schedule: Schedule) -> Schedule:
    """Adds a SYNC for each chunk after its last backward and the send that others wait for."""
    rows = tuple(_with_sync(order, set(schedule.chunks_of(rank))) for rank, order in enumerate(schedule.actions))
    return replace(schedule, actions=rows)


def _with_sync(order: tuple[Action, ...], chunks: set[int]) -> tuple[Action, ...]:
    result = list(order)
    for index in range(len(order) - 1, -1, -1):
        if not chunks:
            break
        chunk, kind, _ = order[index]
        if chunk in chunks and (kind in FINISHING or kind is Kind.SEND_BACKWARD):
            chunks.discard(chunk)
            result.insert(index + 1, Action(chunk, Kind.SYNC_GRADIENTS))
    return tuple(result)
