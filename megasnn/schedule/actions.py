"""Actions, and schedules as a list of actions for each pipeline rank.

An action prints in the notation of ``torch.distributed.pipelining``: ``2F0`` is the forward of segment 2
on micro-batch 0 and ``1B3`` the backward of segment 1 on micro-batch 3, or in two parts ``1I3``, the gradient of its
input, and ``1W3``, that of its weights. ``1R3`` computes the forward again where it kept nothing for the backward.
``0SEND_F2`` sends what segment 0 computed from micro-batch 2. ``0REDUCE_GRAD`` ends the sums of segment 0's gradients
over the data parallel replicas: those that are complete are on their way already. Where replicas shard weights,
``3UNSHARD`` starts to gather those of segment 3, ``3RESHARD`` frees them, and ``3REDUCE_SCATTER5`` sends the gradients
of micro-batch 5 to the ranks that keep them.

A chunk is a run of layers that a rank owns (elsewhere: a virtual stage). A segment is what one action computes: a
chunk, or, after `refine`, one layer of it. Both are numbered from the input to the loss over the whole pipeline, and
`Schedule.placement` gives the pipeline rank of each segment.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """Kind of an action."""

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

    __hash__ = object.__hash__  # members are single objects; Enum hashes their names, in Python

    @property
    def is_receive(self) -> bool:
        return self in RECEIVES


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.RECOMPUTE})
USES_WEIGHTS = COMPUTE - {Kind.WEIGHT_GRADIENT}
PROPAGATING = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT})  # the segment before waits for their result
FINISHING = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRADIENT})  # they free the activations of the forward
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
SHARDING = frozenset({Kind.UNSHARD, Kind.RESHARD})


ActionKey = tuple[int, int]
"""(segment, micro-batch)."""


class Action(NamedTuple):
    """One thing a pipeline rank does. A tuple, since large schedules have half a million of them.

    `uSEND_F m` sends the output of segment u and is matched by `(u+1)RECV_F m` on the rank of segment u+1;
    `uSEND_B m` sends the gradient of the input of segment u and is matched by `(u-1)RECV_B m`.
    """

    segment: int
    kind: Kind
    micro_batch: int | None = None  # None for what is done once a step

    def __str__(self) -> str:
        return f"{self.segment}{self.kind.value}{'' if self.micro_batch is None else self.micro_batch}"

    @property
    def key(self) -> ActionKey:
        """Segment and micro-batch of an action that has one."""
        assert self.micro_batch is not None
        return self.segment, self.micro_batch

    @property
    def peer(self) -> Action:
        """Other end of a transfer. Raises ValueError for an action that is none."""
        if self.kind not in _OTHER_END:
            raise ValueError(f"{self} is no transfer")
        kind, step = _OTHER_END[self.kind]
        return Action(self.segment + step, kind, self.micro_batch)


_OTHER_END = {
    Kind.SEND_FORWARD: (Kind.RECV_FORWARD, +1),
    Kind.RECV_FORWARD: (Kind.SEND_FORWARD, -1),
    Kind.SEND_BACKWARD: (Kind.RECV_BACKWARD, -1),
    Kind.RECV_BACKWARD: (Kind.SEND_BACKWARD, +1),
}


@dataclass(frozen=True)
class Schedule:
    """Actions of every pipeline rank, in order.

    Attributes:
        name: of the generator, for messages.
        placement: pipeline rank of each segment.
        micro_batches: number that each segment computes.
        actions: one sequence for each pipeline rank.
        forward_only: evaluation; there are no backward actions.
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

    def segments_of(self, rank: int) -> tuple[int, ...]:
        """Segments of a pipeline rank, ascending."""
        return tuple(segment for segment, home in enumerate(self.placement) if home == rank)


Position = tuple[int, int]
"""(pipeline rank, index of its action)."""
AROUND = 6  # actions shown on each side of a mark


def format_actions(orders: Collection[Sequence[Action]], marks: Collection[Position] = ()) -> str:
    """Formats actions, a line for each rank.

    Args:
        orders: actions of each rank.
        marks: positions to point out as ``>1B3<``; an index behind the last action is its end. With marks, only the
            actions near them are shown.
    """
    lines = []
    first = max(0, min((index for _, index in marks), default=0) - AROUND)
    behind = max((index for _, index in marks), default=max(map(len, orders), default=0)) + AROUND + 1
    for rank, order in enumerate(orders):
        row = [*map(str, order), "end"]
        shown = [f">{text}<" if (rank, at) in marks else text for at, text in enumerate(row)][first:behind]
        cut = "... " if first else "", " ..." if len(row) > behind else ""
        lines.append(f"rank {rank}: {' '.join(shown).join(cut)}")
    return "\n".join(lines)


def crosses(placement: Sequence[int], segment: int) -> bool:
    """True if the output of a segment goes to another rank; there are segments before and behind it."""
    return 0 <= segment < len(placement) - 1 and placement[segment] != placement[segment + 1]
