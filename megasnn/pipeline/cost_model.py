"""Costs of layers and of links between ranks, as numbers; `profile_layers` measures them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megasnn.schedule import ChunkCost
from megasnn.schedule.costs import stage_shares

TIMED = "forward", "input_gradient", "weight_gradient"


@dataclass(frozen=True)
class LinkCost:
    """A message of b bytes takes `latency + b * per_byte` seconds."""

    latency: float = 0.0
    per_byte: float = 0.0

    def message(self, size: float) -> float:
        """Seconds of a message."""
        return self.latency + self.per_byte * size

    def exchange(self, ranks: int, size: float) -> float:
        """Seconds in which each rank sends each other one so many bytes, in pairs: n - 1 steps (R. Thakur,
        R. Rabenseifner, W. Gropp, Optimization of Collective Communication Operations in MPICH, 2005)."""
        return (ranks - 1) * self.message(size)

    def all_reduce(self, ranks: int, size: float, on_gpu: bool) -> float:
        """Seconds of a sum of so many bytes that all ranks get: by Gloo in a ring, whose steps grow with the ranks; by
        NCCL, which takes the faster algorithm for a size, in two trees (of the same paper)."""
        if ranks == 1:
            return 0.0
        steps = math.ceil(math.log2(ranks)) if on_gpu else ranks - 1
        return 2 * (steps * self.latency + self.per_byte * size * (ranks - 1) / ranks)


@dataclass(frozen=True)
class LayerCost:
    """One micro-batch through one layer, seconds and bytes.

    Attributes:
        held: bytes kept from the forward until the weight gradient is done.
        working: most bytes that forward, input gradient and weight gradient need above those before each.
        message, gradient: bytes of all that crosses a boundary behind the layer, and of its gradients, on the way.
        output: bytes of that where the layer runs.
        deferred: bytes that an input gradient leaves for the weight gradient.
        collectives, exchanged: calls between ranks that share the layer, and bytes that this rank receives.
        found: bytes kept beside the input where the forward is computed again: statistics of norms, received tensors.
        cast: bytes of the weights' copies in the type of the products, which a step makes once and keeps.
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
    """Costs of every layer of a model for one micro-batch, and of the links between ranks.

    Attributes:
        link: between two stages, or where there is one, between replicas that shard weights.
    """

    layers: tuple[LayerCost, ...]
    link: LinkCost

    def of_chunks(self, bounds: Sequence[range], placement: Sequence[int], recomputes: bool = False) -> list[ChunkCost]:
        """Costs of chunks for the simulator, in seconds; activations in whole stages' micro-batches.

        Args:
            bounds: layers of each chunk. placement: its rank.
            recomputes: backwards take the forwards that are computed again before them, too.
        """
        found = []
        for span, share in zip(bounds, stage_shares(placement), strict=True):
            layers = [self.layers[i] for i in span]
            # A chunk without layers hands its input on.
            last = self.layers[span.stop - 1] if span.stop > 0 else LayerCost()
            forward, inputs, weights = (sum(getattr(each, part) for each in layers) for part in TIMED)
            inputs += recomputes * forward
            transfers = self.link.message(last.message), self.link.message(last.gradient)
            found.append(ChunkCost(forward, inputs, weights, *transfers, activation=share))
        return found

    def with_unshards(self, costs: Sequence[ChunkCost], segment_bytes: Sequence[int], ranks: int) -> list[ChunkCost]:
        """Adds the time of UNSHARD and REDUCE_SCATTER to segments whose weights `ranks` replicas shard."""
        times = [self.link.exchange(ranks, size / ranks) if size else 0.0 for size in segment_bytes]
        return [replace(cost, unshard=time, reduce_scatter=time) for cost, time in zip(costs, times, strict=True)]


def for_samples(counted: Sequence[LayerCost], samples: int, sizes: Sequence[int]) -> LayerCost:
    """Bytes of a layer for so many samples, on the straight line through those counted for the two nearest sizes.

    Args:
        sizes: numbers of samples that `counted` is for, in ascending order. Where there is one, it is `samples`.
    """
    upper = min(max(bisect_left(sizes, samples), 1), len(sizes) - 1)
    lower = max(0, upper - 1)
    first, second = counted[lower], counted[upper]

    def grown(few: int, more: int) -> int:
        return max(0, few + (samples - sizes[lower]) * (more - few) // max(1, sizes[upper] - sizes[lower]))

    values = {name: grown(getattr(first, name), getattr(second, name)) for name in _IN_BYTES}
    forward, inputs, weights = map(grown, first.working, second.working)
    return replace(first, working=(forward, inputs, weights), **values)


_IN_BYTES = "held", "message", "gradient", "found", "deferred", "output", "exchanged"


def layers_per_chunk(bounds: Sequence[range]) -> str:
    """Layers of each chunk, as `--pipeline-model-parallel-layout` takes them."""
    return "|".join(str(len(span)) for span in bounds)
