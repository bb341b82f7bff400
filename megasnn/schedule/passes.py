"""Passes over a schedule: from ordered computations to an executor's actions.

First come transfers and the gradient reduction, as ``_add_send_recv`` in ``torch.distributed.pipelining`` adds them;
then `refine` and `insert_recompute`; then the passes for sharded weights.
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

# Order in which a chunk's segments compute: ascending or descending.
_SEGMENT_STEP = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: -1,
    Kind.INPUT_GRADIENT: -1,
    Kind.WEIGHT_GRADIENT: -1,
    Kind.REDUCE_GRAD: -1,
}
_AT_CHUNK_INPUT = frozenset({Kind.RECV_FORWARD, Kind.SEND_BACKWARD})
NEVER = "never"
AT_ONCE = 2  # all-gathers in flight: for the segment that computes next, and for the one after it
RECOMPUTE: Registry[Callable[[int, int], bool]] = Registry(
    "--recompute",
    {
        "never": lambda micro_batch, micro_batches: False,
        "except-last": lambda micro_batch, micro_batches: micro_batch < micro_batches - 1,
        "always": lambda micro_batch, micro_batches: True,
    },
)
"""By name: (micro-batch, number of micro-batches) -> whether to recompute its forwards."""


def complete(order: Schedule) -> Schedule:
    """Adds transfers and the gradient reduction."""
    return insert_gradient_reduction(insert_transfers(order))


def insert_transfers(schedule: Schedule) -> Schedule:
    """Receives before computations and sends after them, between segments on different ranks."""
    placement = schedule.placement
    # A link carries all messages from one rank to another, forward and backward, in the order of the sends. By (sending
    # rank, receiving rank), the receives.
    links = defaultdict[tuple[int, int], deque[Action]](deque)
    for rank, order in enumerate(schedule.actions):
        for action in order:
            send = _send_after(action, placement)
            if send is not None:
                receive = send.peer
                links[rank, placement[receive.segment]].append(receive)
    orders = []
    for rank, order in enumerate(schedule.actions):
        orders.append(tuple(_with_transfers(order, rank, placement, links)))
    return replace(schedule, actions=tuple(orders))


def _with_transfers(
    order: Sequence[Action], rank: int, placement: Sequence[int], links: Mapping[tuple[int, int], deque[Action]]
) -> Iterator[Action]:
    early: set[Action] = set()
    for action in order:
        needed = _receive_before(action, placement)
        if needed is not None and needed not in early:
            link = links[placement[needed.peer.segment], rank]
            # Messages sent before the needed one must be received first, although no computation needs them yet.
            while link:
                receive = link.popleft()
                yield receive
                if receive == needed:
                    break
                early.add(receive)
        yield action
        send = _send_after(action, placement)
        if send is not None:
            yield send


def _send_after(action: Action, placement: Sequence[int]) -> Action | None:
    segment, kind, m = action
    if kind is Kind.FORWARD and crosses(placement, segment):
        return Action(segment, Kind.SEND_FORWARD, m)
    if kind in PROPAGATING and crosses(placement, segment - 1):
        return Action(segment, Kind.SEND_BACKWARD, m)
    return None


def _receive_before(action: Action, placement: Sequence[int]) -> Action | None:
    segment, kind, m = action
    if kind is Kind.FORWARD and crosses(placement, segment - 1):
        return Action(segment, Kind.RECV_FORWARD, m)
    if kind in PROPAGATING and crosses(placement, segment):
        return Action(segment, Kind.RECV_BACKWARD, m)
    return None


def insert_gradient_reduction(schedule: Schedule) -> Schedule:
    """A REDUCE_GRAD for each segment, after its last backward and the send that follows."""
    orders = []
    for rank, order in enumerate(schedule.actions):
        unreduced = set(schedule.segments_of(rank))
        result = list(order)
        # Backwards, so that an insertion leaves the indices still to come as they are.
        for index in range(len(order) - 1, -1, -1):
            if not unreduced:
                break
            segment, kind, _ = order[index]
            if segment in unreduced and (kind in FINISHING or kind is Kind.SEND_BACKWARD):
                unreduced.discard(segment)
                result.insert(index + 1, Action(segment, Kind.REDUCE_GRAD))
        orders.append(tuple(result))
    return replace(schedule, actions=tuple(orders))


def refine(schedule: Schedule, segments: Sequence[int]) -> Schedule:
    """Splits every chunk computation into segments: forwards ascending, backwards descending.

    The order of all sums and the makespan stay the same.

    Args:
        segments: segments in each chunk, at least one.
    """
    placement: list[int] = []
    for rank, count in zip(schedule.placement, segments, strict=True):
        placement += [rank] * count
    firsts = [0, *accumulate(segments)]
    orders = []
    for order in schedule.actions:
        refined: list[Action] = []
        for action in order:
            refined += _of_segments(action, firsts)
        orders.append(tuple(refined))
    return replace(schedule, placement=tuple(placement), actions=tuple(orders))


def _of_segments(action: Action, firsts: Sequence[int]) -> list[Action]:
    """Splits one action; a transfer stays one action, at the first or last segment."""
    chunk, kind, m = action
    segments = range(firsts[chunk], firsts[chunk + 1])
    if kind in _SEGMENT_STEP:
        return [Action(segment, kind, m) for segment in segments[:: _SEGMENT_STEP[kind]]]
    segment = segments[0] if kind in _AT_CHUNK_INPUT else segments[-1]
    return [Action(segment, kind, m)]


def insert_recompute(schedule: Schedule, wanted: Callable[[int, int], bool]) -> Schedule:
    """Adds an R before backwards; the forward then stashes only its input.

    Args:
        wanted: (segment, micro-batch) -> whether to recompute its forward.
    """
    return schedule.with_orders(lambda order: with_recompute(order, wanted))


def with_recompute(order: Sequence[Action], wanted: Callable[[int, int], bool]) -> tuple[Action, ...]:
    """`insert_recompute` for one rank's actions."""
    result: list[Action] = []
    last_computed: Action | None = None
    for action in order:
        segment, kind, m = action
        if kind in PROPAGATING and m is not None and wanted(segment, m):
            # Right after its own forward, a backward still finds the activations.
            if last_computed != Action(segment, Kind.FORWARD, m):
                # R needs no gradient, so that it runs while the gradient is in flight.
                index = len(result)
                while index and result[index - 1].kind in RECEIVES:
                    index -= 1
                result.insert(index, Action(segment, Kind.RECOMPUTE, m))
        result.append(action)
        if kind in COMPUTE:
            last_computed = action
    return tuple(result)


@dataclass(frozen=True)
class SharedWeights:
    """
    Attributes:
        segment_bytes: each segment's gathered size; 0: no weights.
        scattered: segments whose gradients are reduce-scattered after every micro-batch.
        reshard_after_forward: free a segment's weights between its uses; False: only after its last use.
    """

    segment_bytes: tuple[int, ...]
    scattered: frozenset[int] = frozenset()
    ranks: int = 2
    reshard_after_forward: bool = True

    def insert(self, schedule: Schedule) -> Schedule:
        """Adds UNSHARD, RESHARD and REDUCE_SCATTER, and validates."""
        if not schedule.forward_only:
            schedule = schedule.with_orders(lambda order: _with_reduce_scatters(order, self.scattered))
        schedule = schedule.with_orders(lambda order: _with_unshards(order, self.segment_bytes))
        if not self.reshard_after_forward:
            schedule = schedule.with_orders(_gathered_once)
        validate_weights(schedule, self.segment_bytes, self.scattered)
        return schedule

    def gathered_and_buffers(self, schedule: Schedule, rank: int) -> tuple[int, int]:
        """Peak bytes on a rank for gathered weights, and for buffers in flight."""
        sizes = [self.segment_bytes[segment] for segment in schedule.segments_of(rank)]
        buffer = max(sizes) * (self.ranks - 1) // self.ranks
        # With two ranks, only receives need a buffer; with more, sends need one too.
        if self.ranks > 2:
            buffer *= 2
        gathered = max(resident_weights(schedule, rank, self.segment_bytes))
        with_weights = len(sizes) - sizes.count(0)
        return gathered, buffer * min(AT_ONCE, with_weights)


def _with_unshards(order: Sequence[Action], segment_bytes: Sequence[int]) -> tuple[Action, ...]:
    """Adds an UNSHARD before uses of weights that are not gathered, and a RESHARD after the last use.

    A segment with 0 in `segment_bytes` gets no actions.
    """
    indices = []
    for index, action in enumerate(order):
        if action.kind in USES_WEIGHTS and segment_bytes[action.segment]:
            indices.append(index)
    result: list[Action] = []
    gathered: list[int] = []
    start = 0
    for index, following in zip(indices, _following_segments(order, indices), strict=True):
        segment = order[index].segment
        # The next segment is gathered while this one computes.
        wanted = [segment] if following is None else [segment, following]
        result += [Action(each, Kind.RESHARD) for each in gathered if each not in wanted]
        result += [Action(each, Kind.UNSHARD) for each in wanted if each not in gathered]
        # Sends go before the next frees and gathers, because other ranks wait for them.
        stop = index + 1
        while stop < len(order) and order[stop].kind in SENDS:
            stop += 1
        result += order[start:stop]
        gathered = wanted
        start = stop
    result += [Action(segment, Kind.RESHARD) for segment in gathered]
    return (*result, *order[start:])


def _gathered_once(order: Sequence[Action]) -> tuple[Action, ...]:
    """Leaves each segment's first UNSHARD and its last RESHARD."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, action in enumerate(order):
        if action.kind is Kind.UNSHARD:
            first.setdefault(action.segment, index)
        elif action.kind is Kind.RESHARD:
            last[action.segment] = index
    left = {*first.values(), *last.values()}
    return tuple(action for index, action in enumerate(order) if action.kind not in SHARDING or index in left)


def _following_segments(order: Sequence[Action], indices: Sequence[int]) -> list[int | None]:
    """For each action, the segment that follows its own; None at the end."""
    following: list[int | None] = []
    current: int | None = None
    after: int | None = None
    for index in reversed(indices):
        segment = order[index].segment
        if segment != current:
            after = current
            current = segment
        following.append(after)
    return following[::-1]


def _with_reduce_scatters(order: Sequence[Action], segments: Collection[int]) -> tuple[Action, ...]:
    """Adds a REDUCE_SCATTER after each B or W of these segments."""
    result: list[Action] = []
    due: Action | None = None
    for action in order:
        # Sends and gathers go before the gradients, because other ranks and the next computation wait for them.
        if due is not None and action.kind not in SENDS and action.kind not in SHARDING:
            result.append(due)
            due = None
        result.append(action)
        if action.kind in FINISHING and action.segment in segments:
            due = Action(action.segment, Kind.REDUCE_SCATTER, action.micro_batch)
    if due is not None:
        result.append(due)
    return tuple(result)
