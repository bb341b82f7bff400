"""When the gradients of each pipeline rank are summed over its replicas, on a link beside the computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megasnn.config.optimizer import OptimizerConfig
from megasnn.pipeline.cost_model import LayerCost
from megasnn.planner.analysis import HeldTensor
from megasnn.planner.cluster import Cluster
from megasnn.planner.layout import Layout
from megasnn.planner.states import buckets_of, row_bytes
from megasnn.schedule import Action, Kind
from megasnn.schedule.actions import FINISHING
from megasnn.schedule.simulate import TimedAction


@dataclass(frozen=True)
class Summed:
    """Gradients that travel together.

    Attributes:
        layers: that they are of.
        to_keepers: seconds until those who keep rows have them; 0 where every replica keeps all.
        over_copies: seconds of the sum over the ranks that hold the same; 0 where the processor does it.
        sharing: seconds in which owners of rows then give them to the others.
        travelling: bytes to and from owners of rows of whole parameters.
    """

    layers: frozenset[int]
    to_keepers: float
    over_copies: float
    sharing: float
    travelling: int = 0


class Sums:
    """What ranks of a cluster need to sum up what they have."""

    def __init__(self, cluster: Cluster, optimizer: OptimizerConfig) -> None:
        self._cluster, self._optimizer, self._on_gpu = cluster, optimizer, cluster.machine.kind == "cuda"

    def agreement(self, layout: Layout) -> float:
        """Seconds of what a step reads, which is a sum over all ranks of a few numbers."""
        machine = self._cluster.machine
        link = machine.within if layout.ranks <= self._cluster.ranks_of_node else machine.between
        return link.all_reduce(layout.ranks, 0, self._on_gpu)

    def at_once(self, layout: Layout, kept: int, owned: int) -> Summed:
        """All gradients of a rank, as if they were one bucket: in more of them they take no less.

        Args:
            kept, owned: bytes of the rows that it keeps, and of those that it owns.
        """
        return self._summed(layout, frozenset(), kept, owned)

    def buckets(self, layout: Layout, chunks: Sequence[range], tensors: Sequence[Sequence[HeldTensor]]) -> list[Summed]:
        """In the order in which a rank's gradients are summed.

        Args:
            chunks: the layers of each of its chunks. tensors: of each layer of the model.
        """
        sizes, found = (layout.grid.weight, layout.grid.data, layout.grid.context), list[Summed]()
        for span in reversed(chunks):
            layer_of = {each.name: i for i in span for each in tensors[i]}
            held = [each for i in span for each in tensors[i]]
            for bucket in buckets_of(held, layout, self._optimizer, self._on_gpu):
                layers = frozenset(layer_of[each.name] for each in bucket)
                found.append(self._summed(layout, layers, row_bytes(bucket, sizes[0]), row_bytes(bucket, *sizes)))
        return found

    def _summed(self, layout: Layout, layers: frozenset[int], kept: int, owned: int) -> Summed:
        """Args: kept, owned: bytes of the rows of gradients that a rank keeps, and of those that it owns."""
        grid, copies = layout.grid, layout.grid.data * layout.grid.context
        to_keepers = over_copies = sharing = 0.0
        if grid.weight > 1:  # whole gradients go to those who keep the rows
            to_keepers = self._cluster.link(layout, "weight").exchange(grid.weight, kept)
        link = self._cluster.link(layout, "data")
        if layout.shards_optimizer and copies > 1:
            over_copies = sharing = link.exchange(copies, owned)
        elif copies > 1 and not self._cluster.sums_in_memory(layout):
            over_copies = link.all_reduce(copies, kept, self._on_gpu)
        owns = layout.shards_optimizer and copies > 1 and grid.weight == 1
        travelling = kept - owned + (copies - 1) * owned if owns else 0
        return Summed(layers, to_keepers, over_copies, sharing, travelling)


def gradients_complete(
    row: Sequence[TimedAction], units: Sequence[range], layers: Sequence[LayerCost]
) -> dict[int, float]:
    """When each layer's gradients are, of the layers of a rank: in the last backward, from the last layer on.

    Args:
        row: what the rank does. units: the layers of each unit that is executed.
    """
    found = dict[int, float]()
    for unit, last in {timed.action.chunk: timed for timed in row if timed.action.kind in FINISHING}.items():
        end = last.end
        for i in units[unit]:
            found[i] = end
            whole = last.action.kind is Kind.BACKWARD
            end -= layers[i].weight_gradient + (layers[i].input_gradient if whole else 0.0)
    return found


def reduction_end(row: Sequence[TimedAction], buckets: Sequence[Summed], complete: Mapping[int, float]) -> float:
    """When a rank's last gradients are summed, or its last action is over.

    Buckets travel in one order, from the last chunk's last layers to the first, each when all of it is complete and
    those before it have come, as `GradientBuckets` sends them.

    Args:
        row: what the rank does. buckets: in their order. complete: of each layer.
    """
    free = 0.0
    for each in buckets:
        free = max([free, *(complete.get(layer, 0.0) for layer in each.layers)]) + each.over_copies
    return max([free, *(timed.end for timed in row)])


def sums_for_keepers(actions: Sequence[Action], units: Sequence[range], buckets: Sequence[Summed]) -> dict[int, float]:
    """Where replicas keep rows: seconds of what a rank sends to the keepers, by the place of the action behind which
    it is queued, on the link that gathers weights.

    Args:
        actions: of the rank. units, buckets: as above.
    """
    last = {action.chunk: place for place, action in enumerate(actions) if action.kind in FINISHING}
    place_of = {i: place for unit, place in last.items() for i in units[unit]}
    found, behind = dict[int, float](), 0
    for each in buckets:
        behind = max([behind, *(place_of.get(layer, 0) for layer in each.layers)])
        found[behind] = found.get(behind, 0.0) + each.to_keepers
    return found


def keepers_end(row: Sequence[TimedAction], sums: Mapping[int, float], buckets: Sequence[Summed]) -> float:
    """When a rank's last gradients are summed, where replicas keep rows: those who keep the same sum theirs when all
    has come to them, and all actions are over.

    Args:
        row: what the rank does. sums: by place.
    """
    free = 0.0
    for place, timed in enumerate(row):
        if timed.action.kind is Kind.UNSHARD:
            free = timed.end
        if place in sums:
            free = max(free, timed.end) + sums[place]
    return max([free, *(timed.end for timed in row)]) + sum(each.over_copies for each in buckets)
