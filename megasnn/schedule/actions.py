"""Actions, and schedules as one list of actions per pipeline rank.

An action prints in the notation of ``torch.distributed.pipelining``, as segment, kind and micro-batch:

====================  ===================================================================
``2F0``               forward
``1B3``               whole backward
``1I3``, ``1W3``      its two parts: input gradient and weight gradient
``1R3``               recomputes a forward, which stashed only its input
``0SEND_F2``          sends the output to the next segment; ``1RECV_F2`` receives it
``1SEND_B2``          sends the input gradient to the segment before; ``0RECV_B2`` receives it
``0REDUCE_GRAD``      finishes the gradient reduction over data-parallel replicas
``3UNSHARD``          starts the all-gather of sharded weights
``3RESHARD``          frees the gathered weights
``3REDUCE_SCATTER5``  reduce-scatters the gradients after a micro-batch
====================  ===================================================================

A chunk is a run of layers on one rank (elsewhere: virtual stage). A segment is the part one action computes: a chunk,
or one of its layers after `refine`. Both are numbered from input to loss across the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The value is the printed notation."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    RECOMPUTE = "R"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_SCATTER = "REDUCE_SCATTER"

    # Enum's own __hash__ is a Python function, and every look-up of an action calls it. Members are single objects.
    __hash__ = object.__hash__


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.RECOMPUTE})
USES_WEIGHTS = COMPUTE - {Kind.WEIGHT_GRADIENT}
# The previous segment waits for their result.
PROPAGATING = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT})
# They free the activations of the forward.
FINISHING = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRADIENT})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
SHARDING = frozenset({Kind.UNSHARD, Kind.RESHARD})
# Kind of the other end of a transfer, and the step from this segment to that end's.
_OTHER_END = {
    Kind.SEND_FORWARD: (Kind.RECV_FORWARD, +1),
    Kind.RECV_FORWARD: (Kind.SEND_FORWARD, -1),
    Kind.SEND_BACKWARD: (Kind.RECV_BACKWARD, -1),
    Kind.RECV_BACKWARD: (Kind.SEND_BACKWARD, +1),
}
MARKED_NEIGHBOURS = 6  # actions shown on each side of a mark

ActionKey = tuple[int, int]
"""(segment, micro-batch)."""
Position = tuple[int, int]
"""(pipeline rank, index of its action)."""


class Action(NamedTuple):
    """One step on a pipeline rank; `micro_batch` is None if it is done once per training step."""

    # A tuple, because large schedules hold half a million actions.

    segment: int
    kind: Kind
    micro_batch: int | None = None

    def __str__(self) -> str:
        micro_batch = "" if self.micro_batch is None else self.micro_batch
        return f"{self.segment}{self.kind.value}{micro_batch}"

    @property
    def key(self) -> ActionKey:
        """Only for actions with a micro-batch."""
        assert self.micro_batch is not None
        return self.segment, self.micro_batch

    @property
    def peer(self) -> Action:
        """A send's receive, or a receive's send. Raises ValueError for other kinds."""
        if self.kind not in _OTHER_END:
            raise ValueError(f"{self} is neither a send nor a receive")
        kind, step = _OTHER_END[self.kind]
        return Action(self.segment + step, kind, self.micro_batch)


@dataclass(frozen=True)
class Schedule:
    """
    Attributes:
        placement: each segment's pipeline rank.
        actions: ordered, one sequence per pipeline rank.
    """

    name: str
    placement: tuple[int, ...]
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    forward_only: bool = False

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def segments(self) -> int:
        return len(self.placement)

    def with_orders(self, change: Callable[[tuple[Action, ...]], tuple[Action, ...]]) -> Schedule:
        """The schedule with each rank's actions changed."""
        return replace(self, actions=tuple(map(change, self.actions)))

    def segments_of(self, rank: int) -> tuple[int, ...]:
        """Ascending."""
        return tuple(segment for segment, home in enumerate(self.placement) if home == rank)


def format_actions(orders: Collection[Sequence[Action]], marks: Collection[Position] = ()) -> str:
    """One line per rank.

    Args:
        marks: positions to show as ``>1B3<``, with their neighbours only. The index after the last action is the end.
    """
    marked = [index for _, index in marks]
    longest = max(map(len, orders), default=0)
    first = max(0, min(marked, default=0) - MARKED_NEIGHBOURS)
    stop = max(marked, default=longest) + MARKED_NEIGHBOURS + 1
    lines = []
    for rank, order in enumerate(orders):
        texts = [*map(str, order), "end"]
        for marked_rank, index in marks:
            if marked_rank == rank:
                texts[index] = f">{texts[index]}<"
        line = " ".join(texts[first:stop])
        if first:
            line = f"... {line}"
        if len(texts) > stop:
            line = f"{line} ..."
        lines.append(f"rank {rank}: {line}")
    return "\n".join(lines)


def crosses(placement: Sequence[int], segment: int) -> bool:
    """Whether a segment's output goes to another rank; False for the last segment and for -1."""
    return 0 <= segment < len(placement) - 1 and placement[segment] != placement[segment + 1]
