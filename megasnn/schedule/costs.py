"""Costs of chunks: times to compute and to move, and activations, in any one unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megasnn.schedule.actions import Kind
from megasnn.schedule.memory import stage_shares


@dataclass(frozen=True)
class Transfer:
    """Times of one tensor's way to another rank.

    Attributes:
        time: from the end of the send, with a receive posted, until everything has arrived.
        send: how long it holds up the sender (packing). receive: how long the receiver, after arrival (unpacking).
    """

    time: float
    send: float = 0.0
    receive: float = 0.0


@dataclass(frozen=True)
class ChunkCost:
    """Costs of one chunk for one micro-batch: T_F, T_B and T_W of the zero-bubble papers, and M_B.

    Attributes:
        forward, backward: time to compute.
        input_gradient, weight_gradient: times of a split backward; half of `backward` each when not given.
        transfer: time to move the chunk's output to the next chunk's rank, and that of its gradient back.
        activation: kept by a forward until its backward or weight gradient is done; 1 counts micro-batches.
        output, gradient: the two ways in detail, in place of `transfer`.
        again: time of a forward that is computed again; that of the forward when not given.
        unshard, reduce_scatter: time on the link to the other replicas for the chunk's weights, and for the gradients
            of one micro-batch.
    """

    forward: float
    backward: float
    transfer: float = 0.0
    activation: float = 1.0
    input_gradient: float | None = None
    weight_gradient: float | None = None
    output: Transfer | None = None
    gradient: Transfer | None = None
    again: float | None = None
    unshard: float = 0.0
    reduce_scatter: float = 0.0

    def time(self, kind: Kind) -> float:
        """Time of one computation. Raises KeyError for a kind that is none."""
        return self.times()[kind]

    def times(self) -> dict[Kind, float]:
        """Time of every kind of computation."""
        half = self.backward / 2
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT_GRADIENT: half if self.input_gradient is None else self.input_gradient,
            Kind.WEIGHT_GRADIENT: half if self.weight_gradient is None else self.weight_gradient,
            Kind.RECOMPUTE: self.forward if self.again is None else self.again,
        }

    @property
    def split_backward(self) -> float:
        """Time of a backward in two parts."""
        times = self.times()
        return times[Kind.INPUT_GRADIENT] + times[Kind.WEIGHT_GRADIENT]

    def way(self, forward: bool) -> Transfer:
        """Transfer of the chunk's output, or of the gradient of it."""
        detailed = self.output if forward else self.gradient
        return Transfer(self.transfer) if detailed is None else detailed


def chunk_costs(stages: Sequence[ChunkCost], placement: Sequence[int]) -> list[ChunkCost]:
    """Costs of chunks from those of whole stages, one for each rank: a chunk costs its share of its stage.

    A transfer costs the same however small the chunks are: it carries the whole output of a layer.
    """
    costs = []
    for rank, share in zip(placement, stage_shares(placement), strict=True):
        stage = stages[rank]
        costs.append(
            replace(
                stage,
                forward=stage.forward * share,
                backward=stage.backward * share,
                activation=stage.activation * share,
                input_gradient=stage.time(Kind.INPUT_GRADIENT) * share,
                weight_gradient=stage.time(Kind.WEIGHT_GRADIENT) * share,
                again=stage.time(Kind.RECOMPUTE) * share,
                unshard=stage.unshard * share,
                reduce_scatter=stage.reduce_scatter * share,
            )
        )
    return costs
