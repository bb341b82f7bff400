"""Costs of chunks in any one unit: times to compute and to move, activations, gathered weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megasnn.schedule.actions import FINISHING, Kind, Schedule

_SHARED = "forward", "input_gradient", "weight_gradient", "activation", "unshard", "reduce_scatter"


@dataclass(frozen=True)
class ChunkCost:
    """Costs of one chunk for one micro-batch: T_F, T_B and T_W of the zero-bubble papers, and M_B.

    Attributes:
        forward, input_gradient, weight_gradient: time to compute. A whole backward takes the last two together, and a
            forward that is computed again takes as long as the first one.
        transfer, transfer_back: time to move the chunk's output to the next chunk's rank, and its gradient back.
        activation: kept by a forward until its backward or weight gradient is done; 1 counts micro-batches.
        unshard, reduce_scatter: time on the link to the other replicas for the chunk's weights, and for the gradients
            of one micro-batch.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    transfer: float = 0.0
    transfer_back: float = 0.0
    activation: float = 1.0
    unshard: float = 0.0
    reduce_scatter: float = 0.0

    @property
    def backward(self) -> float:
        """Time of both parts."""
        return self.input_gradient + self.weight_gradient

    def times(self) -> dict[Kind, float]:
        """Time of every kind of computation."""
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT_GRADIENT: self.input_gradient,
            Kind.WEIGHT_GRADIENT: self.weight_gradient,
            Kind.RECOMPUTE: self.forward,
        }


def chunk_costs(stages: Sequence[ChunkCost], placement: Sequence[int]) -> list[ChunkCost]:
    """Costs of chunks from those of whole stages, one for each rank: a chunk costs its share of its stage.

    A transfer costs the same however small the chunks are: it carries the whole output of a layer.
    """
    return [
        replace(stages[rank], **{name: getattr(stages[rank], name) * share for name in _SHARED})
        for rank, share in zip(placement, stage_shares(placement), strict=True)
    ]


def resident_activations(
    schedule: Schedule, rank: int, activation: Sequence[float] | None = None, entering: Sequence[float] | None = None
) -> list[float]:
    """Activations that a rank holds after each of its actions.

    Counted is what forwards keep for the backward: from a segment's forward on a micro-batch until the end of its whole
    backward, or of its weight gradient where the backward is split. An input gradient releases nothing. A forward that
    is computed again keeps its input until then. In evaluation a forward holds its own only while it runs. Not counted:
    tensors in transfer, gradients of activations, weights.

    Args:
        activation: of each segment for one micro-batch; when not given, a rank's segments are equal parts of one stage,
            so that the figures are whole stages' micro-batches.
        entering: the input of each segment as it is kept; nothing when not given.
    """
    shares = activation if activation is not None else stage_shares(schedule.placement)
    if schedule.forward_only:
        return [shares[segment] if kind is Kind.FORWARD else 0.0 for segment, kind, _ in schedule.actions[rank]]
    stashed = entering or [0.0] * schedule.segments
    again = {(segment, m) for segment, kind, m in schedule.actions[rank] if kind is Kind.RECOMPUTE}
    resident, result = 0.0, []
    for segment, kind, m in schedule.actions[rank]:
        if kind is Kind.FORWARD:
            resident += stashed[segment] if (segment, m) in again else shares[segment]
        elif kind is Kind.RECOMPUTE:
            resident += shares[segment] - stashed[segment]
        elif kind in FINISHING:
            resident -= shares[segment]
        result.append(resident)
    return result


def resident_weights(schedule: Schedule, rank: int, segment_bytes: Sequence[int]) -> list[int]:
    """Bytes of gathered weights that a rank holds after each of its actions, those on their way included.

    Args:
        segment_bytes: of the gathered weights of each segment.
    """
    change = {Kind.UNSHARD: 1, Kind.RESHARD: -1}
    order = schedule.actions[rank]
    return list(accumulate(change.get(kind, 0) * segment_bytes[segment] for segment, kind, _ in order))


def stage_shares(placement: Sequence[int]) -> list[float]:
    """Part of its rank's stage that each segment is: one over the number of segments on the rank."""
    segments = Counter(placement)
    return [1 / segments[rank] for rank in placement]
