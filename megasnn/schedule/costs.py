"""Chunk costs in any consistent unit: compute and transfer times, activations, gathered weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megasnn.schedule.actions import FINISHING, Kind, Schedule

# Costs in proportion to a chunk's share of its stage. Transfers are not: each carries a layer's whole output.
_PROPORTIONAL = ("forward", "input_gradient", "weight_gradient", "activation", "unshard", "reduce_scatter")


@dataclass(frozen=True)
class ChunkCost:
    """One chunk's costs per micro-batch: T_F, T_B, T_W and M_B in the zero-bubble papers.

    Attributes:
        transfer: time to send the output to the next chunk's rank.
        transfer_back: time to send its gradient back.
        activation: stashed from the forward until its backward or weight gradient; 1 counts micro-batches.
        unshard: the weights' all-gather time.
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
        return self.input_gradient + self.weight_gradient

    def times(self) -> dict[Kind, float]:
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT_GRADIENT: self.input_gradient,
            Kind.WEIGHT_GRADIENT: self.weight_gradient,
            Kind.RECOMPUTE: self.forward,
        }


def chunk_costs(stages: Sequence[ChunkCost], placement: Sequence[int]) -> list[ChunkCost]:
    """Each chunk costs its share of its rank's stage."""
    costs = []
    for rank, share in zip(placement, stage_shares(placement), strict=True):
        stage = stages[rank]
        shared = {name: getattr(stage, name) * share for name in _PROPORTIONAL}
        costs.append(replace(stage, **shared))
    return costs


def resident_activations(
    schedule: Schedule, rank: int, activation: Sequence[float] | None = None, entering: Sequence[float] | None = None
) -> list[float]:
    """Activations a rank holds after each action.

    A forward holds its activations until its backward ends, or its weight gradient if split. A forward to be recomputed
    holds only its input until then. In evaluation it holds them only while it runs. Tensors in transfer, activation
    gradients and weights do not count.

    Args:
        activation: per segment and micro-batch; None: equal shares, in whole-stage micro-batches.
        entering: each segment's input; None: nothing.
    """
    shares = stage_shares(schedule.placement) if activation is None else activation
    inputs = [0.0] * schedule.segments if entering is None else entering
    order = schedule.actions[rank]
    if schedule.forward_only:
        return [shares[segment] if kind is Kind.FORWARD else 0.0 for segment, kind, _ in order]
    recomputed = {(segment, m) for segment, kind, m in order if kind is Kind.RECOMPUTE}
    resident = 0.0
    result = []
    for segment, kind, m in order:
        if kind is Kind.FORWARD:
            resident += inputs[segment] if (segment, m) in recomputed else shares[segment]
        elif kind is Kind.RECOMPUTE:
            resident += shares[segment] - inputs[segment]
        elif kind in FINISHING:
            # An input gradient alone frees nothing: the weight gradient still needs the activations.
            resident -= shares[segment]
        result.append(resident)
    return result


def resident_weights(schedule: Schedule, rank: int, segment_bytes: Sequence[int]) -> list[int]:
    """Gathered bytes a rank holds after each action, including gathers in flight."""
    resident = 0
    result = []
    for segment, kind, _ in schedule.actions[rank]:
        if kind is Kind.UNSHARD:
            resident += segment_bytes[segment]
        elif kind is Kind.RESHARD:
            resident -= segment_bytes[segment]
        result.append(resident)
    return result


def stage_shares(placement: Sequence[int]) -> list[float]:
    """1 / segments on its rank, for each segment."""
    segments = Counter(placement)
    return [1 / segments[rank] for rank in placement]
