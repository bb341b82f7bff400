"""Proves, before anything runs, that a schedule computes everything once, in a possible order, and cannot
hang."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from operator import lt

from megasnn.schedule.actions import GATHERING, RECEIVES, SENDS, Action, Kind, Place, Schedule, format_actions
from megasnn.schedule.memory import activations_held
from megasnn.schedule.passes import Boundaries

PARTS = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
BACKWARDS = (Kind.BACKWARD, *PARTS)
Link = tuple[int, int, Kind]  # (sending rank, receiving rank, kind of the receive)
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
    either whole (B) or in two parts (I and W). A forward may be computed again (R) once, before its backward. Where a
    chunk's gradients are scattered, they are so once for each micro-batch, before the next one adds its own. With a
    `memory_limit`, no rank ever holds more activations than that; see `activations_held` for what is counted, and
    `activation` for how much each chunk's are.
    """
    _check_placement(schedule)
    boundaries = Boundaries.of(schedule.placement)
    for rank in range(schedule.ranks):
        _check_dependencies(schedule, rank, _places(schedule, rank, boundaries), boundaries)
    _check_links(schedule)
    for _ in runs(schedule):
        pass
    if memory_limit is not None:
        _check_memory(schedule, memory_limit, activation)


def _check_memory(schedule: Schedule, limit: float, activation: Sequence[float] | None) -> None:
    for rank in range(schedule.ranks):
        for index, held in enumerate(activations_held(schedule, rank, activation)):
            if held > limit + ROUNDING:
                problem = f"{held:g} activations are held where --pipeline-memory-limit allows {limit:g}"
                raise ScheduleError(schedule, problem, [(rank, index)])


def runs(schedule: Schedule) -> Iterator[tuple[int, range]]:
    """All actions in an order in which they can run, as (rank, indices of what it does without waiting).

    A receive waits until its send was reached; a send does not hold up its rank. Raises ScheduleError when
    every unfinished rank waits.
    """
    on_the_way: set[tuple[int, Kind, int | None]] = set()  # receives whose send was reached
    waiting: dict[tuple[int, Kind, int | None], int] = {}  # receives that a rank has come to
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
                on_the_way.add(receive)
                if receive in waiting:
                    ready.append(waiting.pop(receive))
            elif kind in RECEIVES and action not in on_the_way:
                waiting[action] = rank
                break
        else:
            at = len(order)
        position[rank] = at
        yield rank, range(start, at)
    held_up = [(rank, at) for rank, at in enumerate(position) if at < len(schedule.actions[rank])]
    if held_up:
        raise ScheduleError(schedule, "deadlock, every marked rank waits for another", held_up)


def _check_placement(schedule: Schedule) -> None:
    if schedule.micro_batches < 1 or not schedule.actions:
        raise ScheduleError(schedule, "there must be at least one micro-batch and one rank")
    if set(schedule.placement) != set(range(schedule.ranks)):
        raise ScheduleError(schedule, f"placement {schedule.placement} must put a chunk on each rank and on no other")


Indices = list[int]  # of one kind of action by one chunk, for each micro-batch; -1 where it is not there
Places = dict[int, dict[Kind, Indices]]  # by chunk


def _places(schedule: Schedule, rank: int, boundaries: Boundaries) -> Places:
    """Where a rank does what; raises ScheduleError unless everything is there once, and nothing else."""
    chunks, order = schedule.chunks_of(rank), schedule.actions[rank]
    places = {chunk: _nowhere(schedule, boundaries, chunk) for chunk in chunks}
    nothing: dict[Kind, Indices] = {}
    problems: list[tuple[int, str]] = []
    for index, (chunk, kind, m) in enumerate(order):
        if kind in GATHERING and chunk in places and m is None:
            continue  # may come several times; see `validate_weights`
        mine = places.get(chunk, nothing).get(kind)
        at = m if kind is not Kind.SYNC_GRADIENTS else 0 if m is None else -1
        if mine is None or at is None or not 0 <= at < len(mine):
            problems.append((index, "does not belong here"))
        elif mine[at] >= 0:
            problems.append((index, "is there twice"))
        else:
            mine[at] = index
    for chunk in chunks:
        problems += [(index, "does not belong here") for index in _wholes_beside_parts(places[chunk])]
    if problems:
        index, problem = min(problems)
        raise ScheduleError(schedule, f"{order[index]} {problem}", [(rank, index)])
    missing = [action for chunk in chunks for action in _missing(chunk, places[chunk])]
    if missing:
        problem = f"rank {rank} lacks {', '.join(map(str, missing[:8]))}"
        raise ScheduleError(schedule, problem, [(rank, len(order))])
    return places


def _nowhere(schedule: Schedule, boundaries: Boundaries, chunk: int) -> dict[Kind, Indices]:
    """The kinds of actions that a chunk may have, none of them found yet."""
    kinds = [Kind.FORWARD]
    kinds += [Kind.RECV_FORWARD] * boundaries.before[chunk] + [Kind.SEND_FORWARD] * boundaries.after[chunk]
    if schedule.forward_only:
        return {kind: [-1] * schedule.micro_batches for kind in kinds}
    kinds += [Kind.BACKWARD, *PARTS, Kind.RECOMPUTE, Kind.SCATTER_GRADIENTS]
    kinds += [Kind.RECV_BACKWARD] * boundaries.after[chunk] + [Kind.SEND_BACKWARD] * boundaries.before[chunk]
    return {kind: [-1] * schedule.micro_batches for kind in kinds} | {Kind.SYNC_GRADIENTS: [-1]}


def _wholes_beside_parts(of_chunk: dict[Kind, Indices]) -> list[int]:
    """Where there is a whole backward of a micro-batch that has a part of one too."""
    backwards = (of_chunk[kind] for kind in (Kind.BACKWARD, *PARTS) if kind in of_chunk)
    return [whole for whole, *parts in zip(*backwards, strict=True) if whole >= 0 and max(parts) >= 0]


def _missing(chunk: int, of_chunk: dict[Kind, Indices]) -> Iterator[Action]:
    for kind, indices in of_chunk.items():
        if min(indices) >= 0 or kind is Kind.RECOMPUTE:
            continue
        if kind is Kind.SCATTER_GRADIENTS and max(indices) < 0:
            continue  # the gradients stay whole until SYNC
        for m, index in enumerate(indices):
            if index < 0 and kind is Kind.SYNC_GRADIENTS:
                yield Action(chunk, kind)
            elif index < 0 and (kind not in BACKWARDS or _is_missing(kind, *(of_chunk[k][m] for k in BACKWARDS))):
                yield Action(chunk, kind, m)


def _is_missing(kind: Kind, whole: int, inputs: int, weights: int) -> bool:
    """Whether a backward that is not there should be: the whole one, unless one of its parts is there."""
    split = max(inputs, weights) >= 0
    return whole < 0 and split == (kind in PARTS)


def _check_dependencies(schedule: Schedule, rank: int, places: Places, boundaries: Boundaries) -> None:
    broken: list[tuple[int, int]] = []
    for chunk in places:
        for needed, used in _needed_on_rank(schedule, places, boundaries, chunk):
            if not all(map(lt, needed, used)):
                broken += [(use, need) for need, use in zip(needed, used, strict=False) if need >= use]
    if broken:
        use, need = min(broken)
        order = schedule.actions[rank]
        raise ScheduleError(schedule, f"{order[use]} needs {order[need]} before it", [(rank, use)])


def _needed_on_rank(
    schedule: Schedule, places: Places, boundaries: Boundaries, chunk: int
) -> Iterator[tuple[Indices, Indices]]:
    """Pairs of lists: where what must come first is, and where what needs it is; by micro-batch.

    What comes from other ranks arrives by a receive.
    """
    mine = places[chunk]
    forward = mine[Kind.FORWARD]
    yield forward, forward[1:]
    if boundaries.before[chunk]:
        yield mine[Kind.RECV_FORWARD], forward
    elif chunk > 0:
        yield places[chunk - 1][Kind.FORWARD], forward
    if boundaries.after[chunk]:
        yield forward, mine[Kind.SEND_FORWARD]
    if schedule.forward_only:
        return
    gradient, finish = _either(mine, Kind.INPUT_GRADIENT), _either(mine, Kind.WEIGHT_GRADIENT)
    yield forward, gradient
    again = [m for m, index in enumerate(mine[Kind.RECOMPUTE]) if index >= 0]
    repeated = [mine[Kind.RECOMPUTE][m] for m in again]
    yield [forward[m] for m in again], repeated
    yield repeated, [gradient[m] for m in again]
    yield gradient, gradient[1:]
    if boundaries.after[chunk]:
        yield mine[Kind.RECV_BACKWARD], gradient
    elif chunk + 1 < schedule.chunks:
        yield _either(places[chunk + 1], Kind.INPUT_GRADIENT), gradient
    if boundaries.before[chunk]:
        yield gradient, mine[Kind.SEND_BACKWARD]
    split = [m for m, index in enumerate(mine[Kind.BACKWARD]) if index < 0]
    yield [gradient[m] for m in split], [finish[m] for m in split]
    yield finish, finish[1:]
    yield finish[-1:], mine[Kind.SYNC_GRADIENTS]  # the others are before it, being ascending
    scattered = mine[Kind.SCATTER_GRADIENTS]
    if max(scattered) >= 0:
        yield finish, scattered
        yield scattered, [*finish[1:], *mine[Kind.SYNC_GRADIENTS]]  # what the next one adds comes to the next one


def _either(of_chunk: dict[Kind, Indices], part: Kind) -> Indices:
    """Where a part of the backward is done, in a whole one or alone."""
    return list(map(max, of_chunk[Kind.BACKWARD], of_chunk[part]))


def _check_links(schedule: Schedule) -> None:
    """Sends and receives of each link, in order: what is first in must be first out."""
    placement = schedule.placement
    sent: dict[Link, list[Action]] = {}
    received: dict[Link, list[Action]] = {}
    for rank, order in enumerate(schedule.actions):
        for action in order:
            kind = action.kind
            if kind in SENDS:
                receive = action.peer
                sent.setdefault((rank, placement[receive.chunk], receive.kind), []).append(receive)
            elif kind in RECEIVES:
                sender = placement[action.chunk - 1 if kind is Kind.RECV_FORWARD else action.chunk + 1]
                received.setdefault((sender, rank, kind), []).append(action)
    for link, expected in sent.items():
        if expected != received[link]:
            receive, due = next(pair for pair in zip(received[link], expected, strict=True) if pair[0] != pair[1])
            raise ScheduleError(
                schedule,
                f"{receive} is next to receive from rank {link[0]}, which sends {due.peer} first",
                [(link[1], schedule.actions[link[1]].index(receive))],
            )
