"""Costs of chunks: times to compute and to move, and activations, in any one unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megasnn.schedule.actions import Kind
from megasnn.schedule.memory import stage_shares


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


_SHARED = "forward", "input_gradient", "weight_gradient", "activation", "unshard", "reduce_scatter"


def chunk_costs(stages: Sequence[ChunkCost], placement: Sequence[int]) -> list[ChunkCost]:
    """Costs of chunks from those of whole stages, one for each rank: a chunk costs its share of its stage.

    A transfer costs the same however small the chunks are: it carries the whole output of a layer.
    """
    return [
        replace(stages[rank], **{name: getattr(stages[rank], name) * share for name in _SHARED})
        for rank, share in zip(placement, stage_shares(placement), strict=True)
    ]
