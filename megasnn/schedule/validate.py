"""Validation before a run: everything is computed once, in a possible order, without deadlock."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

from megasnn.common.files import quantity
from megasnn.schedule.actions import (
    FINISHING,
    PROPAGATING,
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
    """The message shows every rank's actions and marks the position."""

    def __init__(self, schedule: Schedule, problem: str, marks: Collection[Position] = ()) -> None:
        positions = ", ".join(f"rank {rank} at action {index}" for rank, index in marks)
        if positions:
            problem = f"{problem} ({positions})"
        super().__init__(
            f"schedule {schedule.name!r} for {quantity(schedule.micro_batches, 'micro-batch')} on "
            f"{quantity(schedule.ranks, 'pipeline rank')}: {problem}\n{format_actions(schedule.actions, marks)}"
        )


def validate_schedule(schedule: Schedule) -> None:
    """Raises ScheduleError if a complete schedule, with transfers and gradient reduction, is wrong.

    Rules:
        - Every action is present once, on its rank, after everything it uses.
        - A segment's forwards and backwards are ascending in the micro-batch: all schedules accumulate alike.
        - A backward is whole (B) or split (I and W). A recomputed forward (R) comes once, before its backward.
        - REDUCE_SCATTER, if any, follows every micro-batch before the next one adds its gradients.
        - A link's receives are in the order of its sends, and no ranks wait for each other for ever.

    `validate_weights` checks UNSHARD and RESHARD.
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
    order = schedule.actions[rank]
    segments = schedule.segments_of(rank)
    scattered = {segment for segment, kind, _ in order if kind is Kind.REDUCE_SCATTER}
    expected: dict[Action, None] = {}  # a dict, because a set would list missing actions in any order
    for segment in segments:
        expected.update(dict.fromkeys(_expected(schedule, segment, segment in scattered)))
    done: set[Action] = set()
    for index, action in enumerate(order):
        segment, kind, m = action
        # `validate_weights` checks these.
        if kind in SHARDING and segment in segments and m is None:
            continue
        parts = _parts(action)
        gradient = Action(segment, Kind.INPUT_GRADIENT, m)
        required = (gradient,) if kind is Kind.RECOMPUTE else parts
        problem = ""
        if any(part not in expected for part in required):
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
    segment, kind, m = action
    if kind is Kind.BACKWARD:
        return Action(segment, Kind.INPUT_GRADIENT, m), Action(segment, Kind.WEIGHT_GRADIENT, m)
    return (action,)


def _expected(schedule: Schedule, segment: int, scattered: bool) -> Iterator[Action]:
    """A segment's actions in a step, except R, UNSHARD and RESHARD."""
    crosses_before = crosses(schedule.placement, segment - 1)
    crosses_after = crosses(schedule.placement, segment)
    kinds = [Kind.FORWARD]
    if crosses_before:
        kinds.append(Kind.RECV_FORWARD)
    if crosses_after:
        kinds.append(Kind.SEND_FORWARD)
    if not schedule.forward_only:
        kinds += [Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT]
        if scattered:
            kinds.append(Kind.REDUCE_SCATTER)
        if crosses_after:
            kinds.append(Kind.RECV_BACKWARD)
        if crosses_before:
            kinds.append(Kind.SEND_BACKWARD)
        yield Action(segment, Kind.REDUCE_GRAD)
    for kind in kinds:
        for m in range(schedule.micro_batches):
            yield Action(segment, kind, m)


def _needed(action: Action, schedule: Schedule, scattered: bool) -> Iterator[Action]:
    """Actions that must come before this one on its rank; a receive stands for another rank's result."""
    segment, kind, m = action
    # Gradients of a micro-batch are accumulated once its W is done, or its reduce-scatter.
    accumulated = Kind.REDUCE_SCATTER if scattered else Kind.WEIGHT_GRADIENT
    if kind is Kind.REDUCE_GRAD:
        yield Action(segment, accumulated, schedule.micro_batches - 1)
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
    elif kind is Kind.SEND_FORWARD or kind is Kind.RECOMPUTE:
        yield Action(segment, Kind.FORWARD, m)
    elif kind is Kind.SEND_BACKWARD:
        yield Action(segment, Kind.INPUT_GRADIENT, m)
    elif kind is Kind.REDUCE_SCATTER:
        yield Action(segment, Kind.WEIGHT_GRADIENT, m)
    if kind in PROPAGATING:
        yield Action(segment, Kind.FORWARD, m)
        if m:
            yield Action(segment, Kind.INPUT_GRADIENT, m - 1)
        if crosses(schedule.placement, segment):
            yield Action(segment, Kind.RECV_BACKWARD, m)
        elif segment + 1 < schedule.segments:
            yield Action(segment + 1, Kind.INPUT_GRADIENT, m)
    if kind is Kind.WEIGHT_GRADIENT:
        yield Action(segment, Kind.INPUT_GRADIENT, m)
    if kind in FINISHING and m:
        yield Action(segment, accumulated, m - 1)


def runs(schedule: Schedule) -> Iterator[tuple[int, range]]:
    """All actions in an executable order, as (rank, indices of actions it runs without waiting).

    A send does not block its rank. Raises ScheduleError for a receive out of order and for a deadlock.
    """
    placement = schedule.placement
    # Sent and not received yet, by link (sending rank, receiving rank).
    in_flight: dict[tuple[int, int], deque[Action]] = {}
    waiting: dict[tuple[int, int], int] = {}  # by link, the rank that waits at a receive
    positions = [0] * schedule.ranks
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        order = schedule.actions[rank]
        start = positions[rank]
        stop = len(order)
        for index in range(start, len(order)):
            action = order[index]
            kind = action.kind
            if kind in SENDS:
                receive = action.peer
                link = rank, placement[receive.segment]
                in_flight.setdefault(link, deque()).append(receive)
                # The receiving rank goes on later: this one first runs as far as it can.
                if link in waiting:
                    ready.append(waiting.pop(link))
            elif kind in RECEIVES:
                link = placement[action.peer.segment], rank
                if not in_flight.get(link):
                    waiting[link] = rank
                    stop = index
                    break
                # A link delivers in the order of the sends.
                first = in_flight[link].popleft()
                if first != action:
                    problem = f"{action} is next to receive from rank {link[0]}, which sends {first.peer} first"
                    raise ScheduleError(schedule, problem, [(rank, index)])
        positions[rank] = stop
        yield rank, range(start, stop)
    blocked = [(rank, index) for rank, index in enumerate(positions) if index < len(schedule.actions[rank])]
    if blocked:
        raise ScheduleError(schedule, "deadlock, every marked rank waits for another", blocked)


def validate_weights(schedule: Schedule, segment_bytes: Sequence[int], scattered: Collection[int] = ()) -> None:
    """Raises ScheduleError if UNSHARD, RESHARD or REDUCE_SCATTER are wrong in a schedule.

    Weights are gathered before use, not twice, and freed once. Gradients are reduce-scattered for exactly the
    `scattered` segments. A segment with 0 in `segment_bytes` has no weights.
    """
    for rank, order in enumerate(schedule.actions):
        gathered: set[int] = set()
        reduced: set[int] = set()
        for index, (segment, kind, _) in enumerate(order):
            problem = ""
            if kind in USES_WEIGHTS:
                if segment_bytes[segment] and segment not in gathered:
                    problem = "needs weights that are not gathered"
            elif kind is Kind.REDUCE_SCATTER:
                if segment not in scattered:
                    problem = "belongs to no segment whose gradients are scattered"
                reduced.add(segment)
            elif kind is Kind.UNSHARD:
                if not segment_bytes[segment]:
                    problem = "gathers a segment without weights"
                elif segment in gathered:
                    problem = "gathers weights that are gathered already"
                gathered.add(segment)
            elif kind is Kind.RESHARD:
                if segment not in gathered:
                    problem = "frees weights that are not gathered"
                gathered.discard(segment)
            if problem:
                raise ScheduleError(schedule, f"{order[index]} {problem}", [(rank, index)])
        missing = [Action(segment, Kind.RESHARD) for segment in sorted(gathered)]
        if not schedule.forward_only:
            for segment in schedule.segments_of(rank):
                if segment in scattered and segment not in reduced:
                    missing.append(Action(segment, Kind.REDUCE_SCATTER))
        if missing:
            listed = ", ".join(map(str, missing))
            raise ScheduleError(schedule, f"rank {rank} lacks {listed}", [(rank, len(order))])
