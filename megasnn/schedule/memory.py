"""What a rank holds, from the order of its actions: activations, gathered weights, or all that a step needs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from megasnn.schedule.actions import COMPUTE, FINISHING, PROPAGATING, RECEIVES, SENDS, Action, Kind, Schedule
from megasnn.schedule.arrivals import known_arrivals, peers


def activations_held(
    schedule: Schedule, rank: int, activation: Sequence[float] | None = None, entering: Sequence[float] | None = None
) -> list[float]:
    """What a rank holds after each of its actions.

    Counted is what forwards leave for the backward: from a chunk's forward on a micro-batch until the end of
    its whole backward, or of its weight gradient where the backward is split. An input gradient releases
    nothing. A forward that is computed again leaves its input until then. In evaluation a forward holds its own only
    while it runs. Not counted: tensors in transfer,
    gradients of activations, weights.

    Args:
        activation: of each chunk for one micro-batch; when not given, a rank's chunks are equal parts of one
            stage, so that the figures are whole stages' micro-batches.
        entering: the input of each chunk as it is kept; nothing when not given.
    """
    shares = activation if activation is not None else stage_shares(schedule.placement)
    if schedule.forward_only:
        return [shares[chunk] if kind is Kind.FORWARD else 0.0 for chunk, kind, _ in schedule.actions[rank]]
    kept = entering or [0.0] * schedule.chunks
    again = {(chunk, m) for chunk, kind, m in schedule.actions[rank] if kind is Kind.RECOMPUTE}
    held, result = 0.0, []
    for chunk, kind, m in schedule.actions[rank]:
        if kind is Kind.FORWARD:
            held += kept[chunk] if (chunk, m) in again else shares[chunk]
        elif kind is Kind.RECOMPUTE:
            held += shares[chunk] - kept[chunk]
        elif kind in FINISHING:
            held -= shares[chunk]
        result.append(held)
    return result


def weights_held(schedule: Schedule, rank: int, unit_bytes: Sequence[int]) -> list[int]:
    """The bytes of gathered weights that a rank holds after each of its actions, those on their way included.

    Args:
        unit_bytes: what the weights of each unit take.
    """
    change = {Kind.GATHER_WEIGHTS: 1, Kind.FREE_WEIGHTS: -1}
    row = schedule.actions[rank]
    return list(accumulate(change.get(kind, 0) * unit_bytes[unit] for unit, kind, _ in row))


def micro_batches_under_way(schedule: Schedule, rank: int) -> dict[int, int]:
    """Of each chunk of a rank, how many micro-batches at most have been forward and are not yet done with backward."""
    now, most = Counter[int](), Counter[int]()
    for chunk, kind, _ in schedule.actions[rank]:
        now[chunk] += (kind is Kind.FORWARD) - (kind in FINISHING)
        most[chunk] = max(most[chunk], now[chunk])
    return dict(most)


def stage_shares(placement: Sequence[int]) -> list[float]:
    """The part of its rank's stage that each chunk is: one over the number of chunks on the rank."""
    chunks = Counter(placement)
    return [1 / chunks[rank] for rank in placement]


@dataclass(frozen=True)
class UnitMemory:
    """What a unit needs for one micro-batch, bytes.

    Attributes:
        held: what its forward keeps. entering: the same where it is computed again.
        working: what a computation needs at most, above what is there before it; what it takes, its input or the
            gradient of its output, is a part of that.
        again: seconds to compute the forward again.
        deferred: what an input gradient leaves for the weight gradient; None: all that the forward has kept.
        output: its output, and the gradient of that, while they wait for the unit that takes them.
        message, gradient: the two on the way to another rank; no gradient where none is needed of its output.
        cast: its weights in another type, which a step makes once and keeps.
        last: `working` of what computes its last gradients of a step, with what travels to those who own rows; None: no
            more than before.
    """

    held: float
    entering: float
    working: Mapping[Kind, float]
    again: float
    deferred: float | None = None
    output: float = 0.0
    message: float = 0.0
    gradient: float = 0.0
    cast: float = 0.0
    last: Mapping[Kind, float] | None = None

    @property
    def waiting_gradient(self) -> float:
        """Of its output, while it waits."""
        return self.output if self.gradient else 0.0


class Moment(NamedTuple):
    """Bytes that a rank needs while it computes.

    Attributes:
        kept: what forwards have left for their backwards, and weights in another type.
        working: what the computation needs beside that.
        messages: outputs and gradients that wait for somebody or are on their way, and what travels between replicas.
    """

    action: Action
    kept: float
    working: float
    messages: float


def moments(
    schedule: Schedule,
    rank: int,
    units: Sequence[UnitMemory],
    exchanged: int = 0,
) -> Iterator[Moment]:
    """Every computation of a rank, and what comes behind them.

    Args:
        units: of each chunk of the schedule.
        exchanged: bytes that travel to and from those who own rows, behind all computations.
    """
    row, last = schedule.actions[rank], schedule.chunks - 1
    again = {(unit, m) for unit, kind, m in row if kind is Kind.RECOMPUTE}
    kept, waiting = cast_bytes(schedule, rank, units), 0.0
    finish = {action.chunk: index for index, action in enumerate(row) if action.kind in FINISHING}
    arrivals = known_arrivals(schedule, rank)
    sent: dict[int, deque[float]] = {peer: deque() for peer in peers(schedule.placement, rank)}
    arrived, on_the_way = dict.fromkeys(sent, 0), 0.0  # bytes are whole numbers: sums and differences are exact
    for index, action in enumerate(row):
        unit, kind, m = action
        memory, is_again = units[unit], (unit, m) in again
        deferred = memory.held if memory.deferred is None else memory.deferred
        before, gradient = (units[unit - 1].output, units[unit - 1].waiting_gradient) if unit else (0.0, 0.0)
        if kind is Kind.FORWARD:
            waiting -= before
            kept += memory.entering if is_again else 0.0
        elif kind in PROPAGATING and unit < last:
            waiting -= memory.waiting_gradient
        if kind in COMPUTE and kind in memory.working:
            coming = sum(_size(units, each) for each in _received_next(row, index))
            if memory.last is not None and index == finish.get(unit):
                coming += memory.last[kind] - memory.working[kind]
            yield Moment(action, kept, memory.working[kind], waiting + coming + on_the_way)
        if kind is Kind.FORWARD:
            kept += 0.0 if is_again else memory.held
            waiting += memory.output if unit < last else 0.0
        elif kind is Kind.RECOMPUTE:
            kept += memory.held - memory.entering
        elif kind in PROPAGATING:
            kept -= memory.held - (deferred if kind is Kind.INPUT_GRADIENT else 0.0)
            waiting += gradient
        elif kind is Kind.WEIGHT_GRADIENT:
            kept -= deferred
        elif kind in SENDS:
            sent[schedule.placement[action.peer.chunk]].append(size := _size(units, action))
            on_the_way += size
            waiting -= memory.output if kind is Kind.SEND_FORWARD else gradient
        elif kind in RECEIVES:
            waiting += before if kind is Kind.RECV_FORWARD else memory.waiting_gradient
            peer = schedule.placement[action.peer.chunk]
            while arrived[peer] < arrivals[action]:
                on_the_way -= sent[peer].popleft()
                arrived[peer] += 1
    if row and exchanged:
        yield Moment(row[-1], cast_bytes(schedule, rank, units), 0.0, exchanged)


def cast_bytes(schedule: Schedule, rank: int, units: Sequence[UnitMemory]) -> float:
    """Of a rank's weights in another type, which are there until the end of a step."""
    return sum(unit.cast for unit, place in zip(units, schedule.placement, strict=True) if place == rank)


def _received_next(row: Sequence[Action], index: int) -> Iterator[Action]:
    """What comes in before the next computation: there is room for it beside this one. All units of one forward, or of
    one backward, are one computation here."""
    _, kind, m = row[index]
    together = PROPAGATING | {Kind.RECOMPUTE} if kind in PROPAGATING | {Kind.RECOMPUTE} else {kind}
    for action in row[index + 1 :]:
        if action.kind in COMPUTE and (action.kind not in together or action.micro_batch != m):
            return
        if action.kind.is_receive:
            yield action


def _size(units: Sequence[UnitMemory], transfer: Action) -> float:
    """Bytes of a transfer."""
    chunk, kind, _ = transfer
    if kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD):
        return units[chunk if kind is Kind.SEND_FORWARD else chunk - 1].message
    return units[chunk if kind is Kind.RECV_BACKWARD else chunk - 1].gradient
