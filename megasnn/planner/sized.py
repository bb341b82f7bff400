"""The layers of one size of tensor and context parallelism, and their chunks on any placement, each computed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts
from megasnn.pipeline.peak_memory import unit_memory
from megasnn.schedule import ChunkCost, Kind
from megasnn.schedule.partition import placed_bounds

Placement = tuple[int, ...]


@dataclass(frozen=True)
class Chunks:
    """Of each chunk.

    Attributes:
        costs: for the simulator.
        kept: bytes that it keeps of a micro-batch; of_backward: that it needs in the backward of one at least, with
            what it keeps of that. Both where nothing is computed again, and where all forwards are.
        again: seconds of forwards that are computed again.
    """

    costs: tuple[ChunkCost, ...]
    kept: dict[bool, tuple[int, ...]]
    of_backward: dict[bool, tuple[int, ...]]
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
        units = unit_memory(PipelineCosts(costs, LinkCost()), [range(i, i + 1) for i in range(len(costs))])
        self._kept = {False: [each.held for each in units], True: [each.entering for each in units]}
        # A schedule may do a backward in one go or in two.
        self._working = [min(each.working[Kind.BACKWARD], each.working[Kind.INPUT_GRADIENT]) for each in units]

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
        return Chunks(
            costs=tuple(PipelineCosts(layers, link).of_chunks(bounds, placement)),
            kept={which: tuple(sum(kept[i] for i in span) for span in bounds) for which, kept in self._kept.items()},
            of_backward={which: tuple(self._of_backward(span, which) for span in bounds) for which in self._kept},
            # The last layer of a chunk goes backward right behind its forward.
            again=tuple(sum(layers[i].again or layers[i].forward for i in span[:-1]) for span in bounds),
        )

    def _of_backward(self, span: range, again: bool) -> int:
        """Each layer's, with all that it has kept, while those before it keep theirs, and those behind it are done."""
        most = before = 0
        for i in span:
            most = max(most, before + self.costs[i].held + self._working[i])
            before += self._kept[again][i]
        return most
