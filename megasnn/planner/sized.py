"""The layers of one size of tensor and context parallelism, and their chunks on any placement, each computed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megasnn.pipeline.costs import LayerCost, LinkCost, PipelineCosts
from megasnn.schedule import ChunkCost
from megasnn.schedule.partition import placed_bounds

Placement = tuple[int, ...]


@dataclass(frozen=True)
class Chunks:
    """Of each chunk: its costs; bytes that it keeps of a micro-batch, also where forwards are computed again, and that
    its last layer's backward works with; seconds of forwards that are computed again."""

    costs: tuple[ChunkCost, ...]
    held: tuple[int, ...]
    entering: tuple[int, ...]
    working: tuple[int, ...]
    again: tuple[float, ...]


@lru_cache(maxsize=4096)
def balanced(seconds: tuple[float, ...], placement: Placement) -> tuple[range, ...]:
    """The layers of each chunk. Layers without exchanges take the same on any links."""
    return tuple(placed_bounds(seconds, placement))


class SizedLayers:
    """Attributes: costs: of each layer."""

    def __init__(self, costs: tuple[LayerCost, ...]) -> None:
        self.costs = costs
        self._seconds = tuple(layer.seconds for layer in costs)
        self._chunks: dict[tuple[LinkCost, Placement], Chunks] = {}

    def bounds(self, placement: Placement) -> tuple[range, ...]:
        """The layers of each chunk, balanced."""
        return balanced(self._seconds, placement)

    def chunks(self, link: LinkCost, placement: Placement) -> Chunks:
        """Args: link: between two stages."""
        if (link, placement) not in self._chunks:
            self._chunks[link, placement] = self._made(link, placement)
        return self._chunks[link, placement]

    def _made(self, link: LinkCost, placement: Placement) -> Chunks:
        bounds, layers = self.bounds(placement), self.costs
        costs = PipelineCosts(layers, link)
        return Chunks(
            costs=tuple(costs.of_chunks(bounds, placement)),
            held=tuple(costs.held_bytes(bounds)),
            entering=tuple(sum(costs.entering_bytes([range(i, i + 1)])[0] for i in span) for span in bounds),
            working=tuple(layers[span[-1]].working[1] if span else 0 for span in bounds),
            # The last layer of a chunk goes backward right behind its forward.
            again=tuple(sum(layers[i].again or layers[i].forward for i in span[:-1]) for span in bounds),
        )
