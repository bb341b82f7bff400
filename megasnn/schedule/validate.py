"""Proves, before anything runs, that a schedule computes everything once, in a possible order, and cannot
hang."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.draw import Place, format_actions
from megasnn.schedule.memory import activations_held
from megasnn.schedule.passes import Link, transfers_of

ROUNDING = 1e-9  # thirds of a stage do not sum to a whole one


class ScheduleError(ValueError):
    """A schedule that must not run; the text shows the actions of every rank and points at the place."""

    def __init__(self, schedule: Schedule, problem: str, marks: Collection[Place] = ()) -> None:
        where = ", ".join(f"rank {rank} at action {index}" for rank, index in marks)
        super().__init__(
            f"schedule {schedule.name!r} for {schedule.micro_batches} micro-batches on {schedule.ranks} "
            f"pipeline rank(s): {problem}{f' ({where})' if where else ''}\n"
            f"{format_actions(schedule.actions, marks)}"
        )


def validate(schedule: Schedule, memory_limit: float | None = None, activation: Sequence[float] | None = None) -> None:
    """Raises ScheduleError for a complete schedule (with transfers and gradient sync) that is wrong.

    Every action is there exactly once and on the right rank; everything an action uses is there before it;
    a chunk's forwards and backwards are in ascending order, so that every schedule accumulates alike; receives
    on a link are in the order of the sends; and no rank waits for ever. A chunk's backward on a micro-batch is
    either whole (B) or in two parts (I and W). With a `memory_limit`, no rank ever holds more activations than
    that; see `activations_held` for what is counted, and `activation` for how much each chunk's are.
    """
    _check_placement(schedule)
    for rank in range(schedule.ranks):
        _check_complete(schedule, rank)
        _check_dependencies(schedule, rank)
    _check_links(schedule)
    for _ in execution_order(schedule):
        pass
    if memory_limit is not None:
        _check_memory(schedule, memory_limit, activation)


def _check_memory(schedule: Schedule, limit: float, activation: Sequence[float] | None) -> None:
    for rank in range(schedule.ranks):
        for index, held in enumerate(activations_held(schedule, rank, activation)):
            if held > limit + ROUNDING:
                problem = f"{held:g} activations are held where --pipeline-memory-limit allows {limit:g}"
                raise ScheduleError(schedule, problem, [(rank, index)])


def execution_order(schedule: Schedule) -> Iterator[Place]:
    """The places of all actions in an order in which they can run.

    A receive waits until its send was reached; a send does not hold up its rank. Raises ScheduleError when
    every unfinished rank waits.
    """
    sent: set[Action] = set()
    position = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.actions):
            while position[rank] < len(order):
                action = order[position[rank]]
                if action.kind.is_receive and action.peer not in sent:
                    break
                if action.kind.is_send:
                    sent.add(action)
                yield rank, position[rank]
                position[rank] += 1
                moved = True
    waiting = [(rank, at) for rank, at in enumerate(position) if at < len(schedule.actions[rank])]
    if waiting:
        raise ScheduleError(schedule, "deadlock, every marked rank waits for another", waiting)


def _check_placement(schedule: Schedule) -> None:
    if schedule.micro_batches < 1 or not schedule.actions:
        raise ScheduleError(schedule, "there must be at least one micro-batch and one rank")
    if set(schedule.placement) != set(range(schedule.ranks)):
        raise ScheduleError(schedule, f"placement {schedule.placement} must put a chunk on each rank and on no other")


def expected_actions(schedule: Schedule, rank: int) -> list[Action]:
    """What a rank has to do, in no useful order."""
    expected = []
    present = set(schedule.actions[rank])
    for chunk in schedule.chunks_of(rank):
        for m in range(schedule.micro_batches):
            for kind in (Kind.FORWARD,) if schedule.forward_only else (Kind.FORWARD, *_parts(present, chunk, m)):
                action = Action(chunk, kind, m)
                before, after = transfers_of(schedule, action)
                expected += [*before, action, *after]
        if not schedule.forward_only:
            expected.append(Action(chunk, Kind.SYNC_GRADIENTS))
    return expected


def _parts(present: set[Action], chunk: int, micro_batch: int) -> tuple[Kind, ...]:
    """The kinds of a backward: split as soon as one of its parts is there."""
    split = Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT
    return split if any(Action(chunk, kind, micro_batch) in present for kind in split) else (Kind.BACKWARD,)


def _check_complete(schedule: Schedule, rank: int) -> None:
    expected = set(expected_actions(schedule, rank))
    seen: set[Action] = set()
    for index, action in enumerate(schedule.actions[rank]):
        if action not in expected:
            raise ScheduleError(schedule, f"{action} does not belong here", [(rank, index)])
        if action in seen:
            raise ScheduleError(schedule, f"{action} is there twice", [(rank, index)])
        seen.add(action)
    missing = [action for action in expected_actions(schedule, rank) if action not in seen]
    if missing:
        end = (rank, len(schedule.actions[rank]))
        raise ScheduleError(schedule, f"rank {rank} lacks {', '.join(map(str, missing[:8]))}", [end])


def _check_dependencies(schedule: Schedule, rank: int) -> None:
    present = set(schedule.actions[rank])
    done: set[Action] = set()
    for index, action in enumerate(schedule.actions[rank]):
        for needed in _needed_on_rank(schedule, action, present):
            if needed not in done:
                raise ScheduleError(schedule, f"{action} needs {needed} before it", [(rank, index)])
        done.add(action)


def _needed_on_rank(schedule: Schedule, action: Action, present: set[Action]) -> Iterator[Action]:
    """The actions of the same rank that must come first; what comes from other ranks arrives by a receive."""
    chunk, m = action.chunk, action.micro_batch

    def input_gradient(of_chunk: int, micro_batch: int) -> Action:
        return Action(of_chunk, _parts(present, of_chunk, micro_batch)[0], micro_batch)

    def finish(micro_batch: int) -> Action:
        return Action(chunk, _parts(present, chunk, micro_batch)[-1], micro_batch)

    if m is None:  # gradient sync
        yield finish(schedule.micro_batches - 1)  # the others are before it, being ascending
        return
    received, _ = transfers_of(schedule, action)
    if action.kind is Kind.SEND_FORWARD:
        yield Action(chunk, Kind.FORWARD, m)
    elif action.kind is Kind.SEND_BACKWARD:
        yield input_gradient(chunk, m)
    elif action.kind is Kind.FORWARD:
        yield from received or ([Action(chunk - 1, Kind.FORWARD, m)] if chunk > 0 else [])
        if m > 0:
            yield Action(chunk, Kind.FORWARD, m - 1)
    elif action.kind.propagates:
        yield Action(chunk, Kind.FORWARD, m)
        yield from received or ([input_gradient(chunk + 1, m)] if chunk + 1 < schedule.chunks else [])
        if m > 0:
            yield input_gradient(chunk, m - 1)
    elif action.kind is Kind.WEIGHT_GRADIENT:
        yield input_gradient(chunk, m)
    if action.kind.finishes and m > 0:
        yield finish(m - 1)


def _check_links(schedule: Schedule) -> None:
    """Sends and receives of each link, in order: what is first in must be first out."""
    sends: dict[Link, list[Action]] = defaultdict(list)
    receives: dict[Link, list[tuple[Action, Place]]] = defaultdict(list)
    for rank, order in enumerate(schedule.actions):
        for index, action in enumerate(order):
            if action.kind.is_send:
                sends[rank, schedule.placement[action.peer.chunk], action.kind].append(action)
            elif action.kind.is_receive:
                link = schedule.placement[action.peer.chunk], rank, action.peer.kind
                receives[link].append((action, (rank, index)))
    for link, received in receives.items():
        for send, (receive, place) in zip(sends[link], received, strict=True):
            if receive.peer != send:
                raise ScheduleError(
                    schedule,
                    f"{receive} is next to receive from rank {link[0]}, which sends {send} first",
                    [place],
                )
