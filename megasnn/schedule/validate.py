"""Proof, before anything runs, that a schedule computes everything once, in a possible order, and cannot hang."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

from megasnn.schedule.actions import (
    RECEIVES,
    SENDS,
    SHARDING,
    USES_WEIGHTS,
    Action,
    Kind,
    Position,
    Schedule,
    crosses,
    format_actions,
)

MOST_LISTED = 8  # missing actions


class ScheduleError(ValueError):
    """A schedule that must not run; the text shows the actions of every rank and points at the position."""

    def __init__(self, schedule: Schedule, problem: str, marks: Collection[Position] = ()) -> None:
        where = ", ".join(f"rank {rank} at action {index}" for rank, index in marks)
        super().__init__(
            f"schedule {schedule.name!r} for {schedule.micro_batches} micro-batches on {schedule.ranks} "
            f"pipeline rank(s): {problem}{f' ({where})' if where else ''}\n"
            f"{format_actions(schedule.actions, marks)}"
        )


def validate_schedule(schedule: Schedule) -> None:
    """Raises ScheduleError for a complete schedule (with transfers and reduction of gradients) that is wrong.

    Every action is there exactly once and on the right rank; everything an action uses is there before it; a segment's
    forwards and backwards are in ascending order, so that every schedule accumulates alike; receives on a link are in
    the order of the sends; and no rank waits for ever. A segment's backward on a micro-batch is either whole (B) or in
    two parts (I and W). A forward may be computed again (R) once, before its backward. Where a segment has
    REDUCE_SCATTER, it has one for each micro-batch, before the next one adds its gradients. UNSHARD and RESHARD are
    proved by `validate_weights`.
    """
    if schedule.micro_batches < 1 or not schedule.actions:
        raise ScheduleError(schedule, "there must be at least one micro-batch and one rank")
    if set(schedule.placement) != set(range(schedule.ranks)):
        raise ScheduleError(schedule, f"placement {schedule.placement} must put a segment on each rank and on no other")
    for rank in range(schedule.ranks):
        _check_rank(schedule, rank)
    for _ in runs(schedule):
        pass


def _check_rank(schedule: Schedule, rank: int) -> None:
    """Follows a rank's actions: each must be one that belongs here, for the first time, behind all that it needs."""
    order, segments = schedule.actions[rank], schedule.segments_of(rank)
    scattered = {segment for segment, kind, _ in order if kind is Kind.REDUCE_SCATTER}
    expected = {part: None for segment in segments for part in _expected(schedule, segment, segment in scattered)}
    done: set[Action] = set()
    for index, action in enumerate(order):
        segment, kind, m = action
        if kind in SHARDING and segment in segments and m is None:
            continue
        parts = _parts(action)
        gradient = Action(segment, Kind.INPUT_GRADIENT, m)
        allowed = gradient in expected if kind is Kind.RECOMPUTE else all(part in expected for part in parts)
        problem = ""
        if not allowed:
            problem = "does not belong here"
        elif any(part in done for part in parts):
            problem = "is there twice"
        elif kind is Kind.RECOMPUTE and gradient in done:
            problem = "comes behind its backward"
        else:
            for needed in _needed(action, schedule, segment in scattered):
                if needed not in done:
                    problem = f"needs {needed} before it"
                    break
        if problem:
            raise ScheduleError(schedule, f"{action} {problem}", [(rank, index)])
        done.update(parts)
    missing = [part for part in expected if part not in done]
    if missing:
        listed = ", ".join(map(str, missing[:MOST_LISTED]))
        raise ScheduleError(schedule, f"rank {rank} lacks {listed}", [(rank, len(order))])


def _parts(action: Action) -> tuple[Action, ...]:
    """A whole backward does the work of both of its parts."""
    segment, kind, m = action
    if kind is Kind.BACKWARD:
        return Action(segment, Kind.INPUT_GRADIENT, m), Action(segment, Kind.WEIGHT_GRADIENT, m)
    return (action,)


def _expected(schedule: Schedule, segment: int, scattered: bool) -> Iterator[Action]:
    """All that a segment must do in a step, recomputation and gathered weights apart."""
    before, after = crosses(schedule.placement, segment - 1), crosses(schedule.placement, segment)
    kinds = [Kind.FORWARD, *[Kind.RECV_FORWARD] * before, *[Kind.SEND_FORWARD] * after]
    if not schedule.forward_only:
        kinds += [Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, *[Kind.REDUCE_SCATTER] * scattered]
        kinds += [Kind.RECV_BACKWARD] * after + [Kind.SEND_BACKWARD] * before
        yield Action(segment, Kind.REDUCE_GRAD)
    yield from (Action(segment, kind, m) for kind in kinds for m in range(schedule.micro_batches))


def _needed(action: Action, schedule: Schedule, scattered: bool) -> Iterator[Action]:
    """Actions that must come before an action on its rank; results of other ranks arrive by a receive."""
    segment, kind, m = action
    if kind is Kind.REDUCE_GRAD:
        last = schedule.micro_batches - 1
        yield Action(segment, Kind.REDUCE_SCATTER if scattered else Kind.WEIGHT_GRADIENT, last)
        return
    if m is None or kind in RECEIVES:
        return
    if kind is Kind.FORWARD:
        if m:
            yield Action(segment, Kind.FORWARD, m - 1)
        if crosses(schedule.placement, segment - 1):
            yield Action(segment, Kind.RECV_FORWARD, m)
        elif segment:
            yield Action(segment - 1, Kind.FORWARD, m)
    elif kind in (Kind.SEND_FORWARD, Kind.RECOMPUTE):
        yield Action(segment, Kind.FORWARD, m)
    elif kind is Kind.SEND_BACKWARD:
        yield Action(segment, Kind.INPUT_GRADIENT, m)
    elif kind is Kind.REDUCE_SCATTER:
        yield Action(segment, Kind.WEIGHT_GRADIENT, m)
    if kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
        yield Action(segment, Kind.FORWARD, m)
        if m:
            yield Action(segment, Kind.INPUT_GRADIENT, m - 1)
        if crosses(schedule.placement, segment):
            yield Action(segment, Kind.RECV_BACKWARD, m)
        elif segment + 1 < schedule.segments:
            yield Action(segment + 1, Kind.INPUT_GRADIENT, m)
    if kind is Kind.WEIGHT_GRADIENT:
        yield Action(segment, Kind.INPUT_GRADIENT, m)
    if kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT) and m:
        yield Action(segment, Kind.REDUCE_SCATTER if scattered else Kind.WEIGHT_GRADIENT, m - 1)


def runs(schedule: Schedule) -> Iterator[tuple[int, range]]:
    """All actions in an order in which they can run, as (rank, indices of what it does without waiting).

    A receive waits until its send was reached; a send does not hold up its rank. Raises ScheduleError for a receive out
    of turn, since what is first in on a link is first out, and when every unfinished rank waits.
    """
    placement, on_the_way = schedule.placement, dict[tuple[int, int], deque[Action]]()
    waiting: dict[tuple[int, int], int] = {}  # ranks that have come to a receive, by its link
    position = [0] * schedule.ranks
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        order, start = schedule.actions[rank], position[rank]
        at = start
        for at in range(start, len(order)):  # noqa: B007  (the place where it stops is what counts)
            action = order[at]
            kind = action.kind
            if kind in SENDS:
                receive = action.peer
                link = rank, placement[receive.segment]
                on_the_way.setdefault(link, deque()).append(receive)
                if link in waiting:
                    ready.append(waiting.pop(link))
            elif kind in RECEIVES:
                link = placement[action.peer.segment], rank
                if not on_the_way.get(link):
                    waiting[link] = rank
                    break
                first = on_the_way[link].popleft()
                if first != action:
                    problem = f"{action} is next to receive from rank {link[0]}, which sends {first.peer} first"
                    raise ScheduleError(schedule, problem, [(rank, at)])
        else:
            at = len(order)
        position[rank] = at
        yield rank, range(start, at)
    held_up = [(rank, at) for rank, at in enumerate(position) if at < len(schedule.actions[rank])]
    if held_up:
        raise ScheduleError(schedule, "deadlock, every marked rank waits for another", held_up)


def validate_weights(schedule: Schedule, segment_bytes: Sequence[int], scattered: Collection[int] = ()) -> None:
    """Raises ScheduleError for a schedule, valid without that, whose UNSHARD, RESHARD or REDUCE_SCATTER are wrong.

    Weights are gathered where they are used, not twice, and freed once; at the end none are left. Every gradient of the
    segments that are scattered is; no other.

    Args:
        segment_bytes: of the gathered weights of each segment; 0: it has none.
        scattered: segments.
    """
    for rank, order in enumerate(schedule.actions):
        live, reduced = set[int](), set[int]()
        for index, (segment, kind, _) in enumerate(order):
            problem = ""
            if kind in USES_WEIGHTS and segment_bytes[segment] and segment not in live:
                problem = "needs weights that are not gathered"
            elif kind is Kind.REDUCE_SCATTER:
                reduced.add(segment)
                problem = "" if segment in scattered else "belongs to no segment whose gradients are scattered"
            elif kind is Kind.UNSHARD:
                if not segment_bytes[segment]:
                    problem = "gathers a segment without weights"
                elif segment in live:
                    problem = "gathers weights that are gathered already"
                live.add(segment)
            elif kind is Kind.RESHARD:
                problem = "" if segment in live else "frees weights that are not gathered"
                live.discard(segment)
            if problem:
                raise ScheduleError(schedule, f"{order[index]} {problem}", [(rank, index)])
        lacks = [f"{segment}RESHARD" for segment in sorted(live)]
        if not schedule.forward_only:
            lacks += [
                f"{segment}REDUCE_SCATTER"
                for segment in schedule.segments_of(rank)
                if segment in {*scattered} - reduced
            ]
        if lacks:
            raise ScheduleError(schedule, f"rank {rank} lacks {', '.join(lacks)}", [(rank, len(order))])
