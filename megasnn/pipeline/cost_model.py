"""Numeric costs: layers, and links between ranks. `profile_layers` measures them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megasnn.schedule import ChunkCost
from megasnn.schedule.costs import stage_shares

TIMED = "forward", "input_gradient", "weight_gradient"
_IN_BYTES = "held", "message", "gradient", "found", "deferred", "output", "exchanged"


@dataclass(frozen=True)
class LinkCost:
    """A message with b bytes takes `latency + b * per_byte` seconds."""

    latency: float = 0.0
    per_byte: float = 0.0

    def message(self, size: float) -> float:
        return self.latency + self.per_byte * size

    def exchange(self, ranks: int, size: float) -> float:
        """Seconds for an all-to-all with `size` bytes between each two ranks.

        Pairwise exchange in n - 1 steps (R. Thakur, R. Rabenseifner, W. Gropp, Optimization of Collective
        Communication Operations in MPICH, 2005).
        """
        return (ranks - 1) * self.message(size)

    def all_reduce(self, ranks: int, size: float, on_gpu: bool) -> float:
        """Seconds for `size` bytes, in Gloo's ring or NCCL's double tree (paper as in `exchange`)."""
        if ranks == 1:
            return 0.0
        # NCCL selects the faster algorithm for a size; the tree has fewer steps.
        steps = math.ceil(math.log2(ranks)) if on_gpu else ranks - 1
        return 2 * (steps * self.latency + self.per_byte * size * (ranks - 1) / ranks)


@dataclass(frozen=True)
class LayerCost:
    """Seconds and bytes for one layer and one micro-batch.

    Attributes:
        held: bytes from forward to the weight gradient's end.
        working: peak bytes in forward, input gradient and weight gradient, above the bytes before each.
        message, gradient: packed bytes at the boundary after the layer; gradient bytes.
        output: unpacked bytes there.
        deferred: bytes from input gradient to weight gradient.
        collectives, exchanged: number; received bytes.
        found: bytes for a recomputation beside the input: norm statistics, received tensors.
        cast: cast weight bytes, stored during a step.
    """

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    held: int = 0
    working: tuple[int, int, int] = (0, 0, 0)
    message: int = 0
    gradient: int = 0
    output: int = 0
    deferred: int = 0
    collectives: int = 0
    exchanged: int = 0
    found: int = 0
    cast: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.input_gradient + self.weight_gradient


@dataclass(frozen=True)
class PipelineCosts:
    """Costs for one micro-batch.

    Attributes:
        link: between two stages; with a single stage, between replicas that shard weights.
        kept_in: file of an earlier start; empty for costs of this one.
    """

    layers: tuple[LayerCost, ...]
    link: LinkCost
    kept_in: str = ""

    def of_chunks(self, bounds: Sequence[range], placement: Sequence[int], recomputes: bool = False) -> list[ChunkCost]:
        """Simulator costs in seconds. Activations are relative to a stage's micro-batch.

        Args:
            bounds, placement: each chunk's layers and pipeline rank.
            recomputes: backwards include the recomputation.
        """
        costs = []
        for span, share in zip(bounds, stage_shares(placement), strict=True):
            forward = 0.0
            input_gradient = 0.0
            weight_gradient = 0.0
            for layer in self.layers[span.start : span.stop]:
                forward += layer.forward
                input_gradient += layer.input_gradient
                weight_gradient += layer.weight_gradient
            if recomputes:
                input_gradient += forward
            # A chunk without layers hands its input on.
            last = self.layers[span.stop - 1] if span.stop > 0 else LayerCost()
            transfers = self.link.message(last.message), self.link.message(last.gradient)
            costs.append(ChunkCost(forward, input_gradient, weight_gradient, *transfers, activation=share))
        return costs

    def with_unshards(self, costs: Sequence[ChunkCost], segment_bytes: Sequence[int], ranks: int) -> list[ChunkCost]:
        """Adds UNSHARD and REDUCE_SCATTER times, for weights sharded by `ranks` replicas."""
        result = []
        for cost, size in zip(costs, segment_bytes, strict=True):
            seconds = self.link.exchange(ranks, size / ranks) if size else 0.0
            result.append(replace(cost, unshard=seconds, reduce_scatter=seconds))
        return result


def for_samples(counted: Sequence[LayerCost], samples: int, sizes: Sequence[int]) -> LayerCost:
    """A layer's bytes, extrapolated linearly from the two nearest counts.

    Args:
        sizes: ascending sample numbers, one for each count. A single one equals `samples`.
    """
    upper = min(max(bisect_left(sizes, samples), 1), len(sizes) - 1)
    lower = max(0, upper - 1)
    distance = max(1, sizes[upper] - sizes[lower])
    below = counted[lower]
    above = counted[upper]

    def on_line(few: int, more: int) -> int:
        return max(0, few + (samples - sizes[lower]) * (more - few) // distance)

    values = {name: on_line(getattr(below, name), getattr(above, name)) for name in _IN_BYTES}
    forward, input_gradient, weight_gradient = map(on_line, below.working, above.working)
    return replace(below, working=(forward, input_gradient, weight_gradient), **values)


def layers_per_chunk(bounds: Sequence[range]) -> str:
    """In the format of --pipeline-model-parallel-layout."""
    return "|".join(str(len(span)) for span in bounds)
