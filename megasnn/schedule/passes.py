"""Transformations of a schedule: from computing alone to what an executor can run.

That communication is added by a pass, and not by the generators, is the idea of ``_add_send_recv`` in
``torch.distributed.pipelining``: a generator then says in what order to compute, and nothing else.
"""

from __future__ import annotations

from dataclasses import replace

from megasnn.schedule.actions import Action, Kind, Schedule


def insert_transfers(schedule: Schedule) -> Schedule:
    """Adds a receive right before each computation that needs one and a send right after each that has a
    taker.

    Neighbouring chunks on the same rank hand their tensors over without a transfer.
    """
    return replace(schedule, actions=tuple(_with_transfers(order, schedule) for order in schedule.actions))


def _with_transfers(order: tuple[Action, ...], schedule: Schedule) -> tuple[Action, ...]:
    result: list[Action] = []
    for action in order:
        chunk, m = action.chunk, action.micro_batch
        before, after = _lives_elsewhere(schedule, chunk, -1), _lives_elsewhere(schedule, chunk, +1)
        if action.kind is Kind.FORWARD:
            result += [Action(chunk, Kind.RECV_FORWARD, m)] * before
            result.append(action)
            result += [Action(chunk, Kind.SEND_FORWARD, m)] * after
        elif action.kind is Kind.BACKWARD:
            result += [Action(chunk, Kind.RECV_BACKWARD, m)] * after
            result.append(action)
            result += [Action(chunk, Kind.SEND_BACKWARD, m)] * before
        else:
            result.append(action)
    return tuple(result)


def _lives_elsewhere(schedule: Schedule, chunk: int, step: int) -> bool:
    neighbour = chunk + step
    return 0 <= neighbour < schedule.chunks and schedule.placement[neighbour] != schedule.placement[chunk]


def insert_gradient_sync(schedule: Schedule) -> Schedule:
    """Adds a SYNC for each chunk as soon as its last backward is done, after the send that others wait
    for."""
    return replace(schedule, actions=tuple(_with_sync(order) for order in schedule.actions))


def _with_sync(order: tuple[Action, ...]) -> tuple[Action, ...]:
    last = {a.chunk: i for i, a in enumerate(order) if a.kind in (Kind.BACKWARD, Kind.SEND_BACKWARD)}
    chunk_ending_at = {index: chunk for chunk, index in last.items()}
    result: list[Action] = []
    for index, action in enumerate(order):
        result.append(action)
        if index in chunk_ending_at:
            result.append(Action(chunk_ending_at[index], Kind.SYNC_GRADIENTS))
    return tuple(result)
