"""Passes over a schedule, which turn an order of computations into actions that an executor can run.

Communication is added by a pass, not by the generators, as ``_add_send_recv`` in ``torch.distributed.pipelining`` does:
a generator says in what order to compute, and nothing else. `refine` and `insert_recompute` are passes over a complete
schedule, whose result whatever reads schedules reads, too.

Passes for weights that replicas share say when segments are gathered and freed, and when gradients are
reduce-scattered. They take a complete schedule of segments. While a segment computes, its own weights are there, and
the weights of the segment that the rank uses next are gathered.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megasnn.common.registry import Registry
from megasnn.schedule.actions import (
    COMPUTE,
    FINISHING,
    PROPAGATING,
    RECEIVES,
    SENDS,
    SHARDING,
    USES_WEIGHTS,
    Action,
    Kind,
    Schedule,
    crosses,
)
from megasnn.schedule.costs import resident_weights
from megasnn.schedule.validate import validate_weights

_OF_ALL_SEGMENTS = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT_GRADIENT: -1, Kind.WEIGHT_GRADIENT: -1}
_OF_ALL_SEGMENTS[Kind.REDUCE_GRAD] = -1
_OF_FIRST_SEGMENT = {Kind.RECV_FORWARD, Kind.SEND_BACKWARD}
NEVER = "never"
AT_ONCE = 2  # gathers on their way: of the segment that computes next, and of the one behind it


def complete(order: Schedule) -> Schedule:
    """Adds transfers and the reduction of gradients to a schedule that only computes."""
    return insert_gradient_reduction(insert_transfers(order))


def insert_transfers(schedule: Schedule) -> Schedule:
    """Adds a receive right before each computation that needs one and a send after each that has a taker.

    Neighbouring segments on the same rank hand their tensors over without a transfer. A link is all that one rank sends
    to another, forward and backward. Receives on it are in the order of the sends: one whose turn comes before it is
    needed is received early.
    """
    placement, links = schedule.placement, defaultdict[tuple[int, int], deque[Action]](deque)
    for rank, order in enumerate(schedule.actions):
        for send in filter(None, (_send(action, placement) for action in order)):
            links[rank, placement[send.peer.segment]].append(send.peer)
    orders = (tuple(_with_transfers(order, rank, placement, links)) for rank, order in enumerate(schedule.actions))
    return replace(schedule, actions=tuple(orders))


def _with_transfers(
    order: Sequence[Action], rank: int, placement: Sequence[int], links: Mapping[tuple[int, int], deque[Action]]
) -> Iterator[Action]:
    early: set[Action] = set()
    for action in order:
        needed = _receive(action, placement)
        if needed is not None and needed not in early:
            link = links[placement[needed.peer.segment], rank]
            while link:
                following = link.popleft()
                yield following
                if following == needed:
                    break
                early.add(following)
        yield action
        send = _send(action, placement)
        if send is not None:
            yield send


def _send(action: Action, placement: Sequence[int]) -> Action | None:
    """Send behind a computation."""
    segment, kind, m = action
    if kind is Kind.FORWARD and crosses(placement, segment):
        return Action(segment, Kind.SEND_FORWARD, m)
    return Action(segment, Kind.SEND_BACKWARD, m) if kind in PROPAGATING and crosses(placement, segment - 1) else None


def _receive(action: Action, placement: Sequence[int]) -> Action | None:
    """Receive before a computation."""
    segment, kind, m = action
    if kind is Kind.FORWARD and crosses(placement, segment - 1):
        return Action(segment, Kind.RECV_FORWARD, m)
    return Action(segment, Kind.RECV_BACKWARD, m) if kind in PROPAGATING and crosses(placement, segment) else None


def insert_gradient_reduction(schedule: Schedule) -> Schedule:
    """Adds a REDUCE_GRAD for each segment after its last backward and the send that others wait for."""
    orders = tuple(
        _with_reduction(order, set(schedule.segments_of(rank))) for rank, order in enumerate(schedule.actions)
    )
    return replace(schedule, actions=orders)


def _with_reduction(order: tuple[Action, ...], segments: set[int]) -> tuple[Action, ...]:
    result = list(order)
    for index in range(len(order) - 1, -1, -1):
        if not segments:
            break
        segment, kind, _ = order[index]
        if segment in segments and (kind in FINISHING or kind is Kind.SEND_BACKWARD):
            segments.discard(segment)
            result.insert(index + 1, Action(segment, Kind.REDUCE_GRAD))
    return tuple(result)


def refine(schedule: Schedule, segments: Sequence[int]) -> Schedule:
    """Splits every computation of a chunk into those of its segments: forwards ascending, backwards descending.

    Same order of all sums, same makespan. `segments` has the number of segments of each chunk, one or more.
    """
    firsts = [0, *accumulate(segments)]
    return replace(
        schedule,
        placement=tuple(rank for rank, count in zip(schedule.placement, segments, strict=True) for _ in range(count)),
        actions=tuple(
            tuple(segment for each in order for segment in _of_segments(each, firsts)) for order in schedule.actions
        ),
    )


def _of_segments(action: Action, firsts: Sequence[int]) -> Iterator[Action]:
    chunk, kind, m = action
    segments = range(firsts[chunk], firsts[chunk + 1])
    if kind in _OF_ALL_SEGMENTS:
        yield from (Action(segment, kind, m) for segment in segments[:: _OF_ALL_SEGMENTS[kind]])
    else:
        yield Action(segments[0] if kind in _OF_FIRST_SEGMENT else segments[-1], kind, m)


RECOMPUTE: Registry[Callable[[int, int], bool]] = Registry(
    "--recompute",
    {
        "never": lambda micro_batch, micro_batches: False,
        "except-last": lambda micro_batch, micro_batches: micro_batch < micro_batches - 1,
        "always": lambda micro_batch, micro_batches: True,
    },
)
"""By name: (micro-batch, number of micro-batches) -> whether its forwards are computed again."""


def insert_recompute(schedule: Schedule, wanted: Callable[[int, int], bool]) -> Schedule:
    """Adds an R before the backward of each (segment, micro-batch) that is wanted; its forward keeps its input alone.

    R comes before the rank waits for what the backward needs. Where nothing is computed between forward and backward
    there is nothing to gain, and no R.
    """
    return replace(schedule, actions=tuple(with_recompute(order, wanted) for order in schedule.actions))


def with_recompute(order: Sequence[Action], wanted: Callable[[int, int], bool]) -> tuple[Action, ...]:
    """One rank's actions with R, as `insert_recompute` adds them."""
    result: list[Action] = []
    computed: Action | None = None  # the last computation
    for action in order:
        segment, kind, m = action
        forward = Action(segment, Kind.FORWARD, m)
        if kind in PROPAGATING and m is not None and wanted(segment, m) and computed != forward:
            at = len(result)
            while at and result[at - 1].kind in RECEIVES:
                at -= 1
            result.insert(at, Action(segment, Kind.RECOMPUTE, m))
        result.append(action)
        if kind in COMPUTE:
            computed = action
    return tuple(result)


@dataclass(frozen=True)
class SharedWeights:
    """Weights to gather.

    Attributes:
        segment_bytes: of the gathered weights of each segment; 0: it has none.
        scattered: segments whose gradients are scattered after every micro-batch.
        ranks: that shard them.
    """

    segment_bytes: tuple[int, ...]
    scattered: frozenset[int] = frozenset()
    ranks: int = 2

    def insert(self, schedule: Schedule) -> Schedule:
        """Adds UNSHARD, RESHARD and REDUCE_SCATTER, proved right."""
        scattered = schedule if schedule.forward_only else insert_reduce_scatters(schedule, self.scattered)
        complete = insert_unshards(scattered, self.segment_bytes)
        validate_weights(complete, self.segment_bytes, self.scattered)
        return complete

    def gathered_and_buffers(self, schedule: Schedule, rank: int) -> tuple[int, int]:
        """Most bytes of gathered weights that a rank holds, and of what comes, and with more than two ranks goes, on
        its way."""
        segments = [
            self.segment_bytes[segment] for segment in schedule.segments_of(rank) if self.segment_bytes[segment]
        ]
        travelling = max(segments, default=0) * (self.ranks - 1) // self.ranks * (1 if self.ranks == 2 else 2)
        return max(resident_weights(schedule, rank, self.segment_bytes)), travelling * min(AT_ONCE, len(segments))


def insert_unshards(schedule: Schedule, segment_bytes: Sequence[int]) -> Schedule:
    """Adds an UNSHARD before computations that do not find their segment's weights, and a RESHARD behind the last use.

    A segment without bytes of weights has no action.
    """
    return replace(schedule, actions=tuple(_with_unshards(order, segment_bytes) for order in schedule.actions))


def _with_unshards(order: Sequence[Action], segment_bytes: Sequence[int]) -> tuple[Action, ...]:
    uses = [
        (at, segment) for at, (segment, kind, _) in enumerate(order) if kind in USES_WEIGHTS and segment_bytes[segment]
    ]
    result: list[Action] = []
    live: Collection[int] = ()
    start = 0
    for number, (at, segment) in enumerate(uses):
        later = (uses[index][1] for index in range(number, len(uses)))
        wanted = dict.fromkeys((segment, next((each for each in later if each != segment), segment)))
        result += [Action(each, Kind.RESHARD) for each in live if each not in wanted]
        result += [Action(each, Kind.UNSHARD) for each in wanted if each not in live]
        end = at + 1
        while end < len(order) and order[end].kind in SENDS:  # others wait for what is sent
            end += 1
        result += order[start:end]
        live, start = wanted, end
    return (*result, *(Action(each, Kind.RESHARD) for each in live), *order[start:])


def insert_reduce_scatters(schedule: Schedule, segments: Collection[int]) -> Schedule:
    """Adds a REDUCE_SCATTER behind each B or W of these segments."""
    return replace(
        schedule, actions=tuple(_with_reduce_scatters(order, frozenset(segments)) for order in schedule.actions)
    )


def _with_reduce_scatters(order: Sequence[Action], segments: Collection[int]) -> tuple[Action, ...]:
    result: list[Action] = []
    due: Action | None = None
    for action in order:
        if due is not None and action.kind not in SENDS | SHARDING:  # others wait for what is sent and gathered
            result.append(due)
            due = None
        result.append(action)
        if action.kind in FINISHING and action.segment in segments:
            due = Action(action.segment, Kind.REDUCE_SCATTER, action.micro_batch)
    return (*result, *([] if due is None else [due]))
