"""The most that a step needs in memory on each pipeline rank, from a schedule and the costs of the layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megasnn.pipeline.costs import LayerCost, PipelineCosts
from megasnn.schedule import Schedule
from megasnn.schedule.memory import UnitMemory, micro_batches_under_way, moments


@dataclass(frozen=True)
class Travelling:
    """Bytes that travel between a rank and those who own rows of its parameters, at most.

    Attributes:
        behind: when all backwards are done. beside: while a layer's last gradients are computed, by layer.
    """

    behind: int
    beside: Mapping[int, int] = field(default_factory=dict)


def under_way(layers: Iterable[int], buckets: Iterable[tuple[frozenset[int], int]]) -> dict[int, int]:
    """What travels while the last gradients of each layer are computed: of the buckets that are complete, the last one.
    Those before it have come, as a rule, and are given back when it starts.

    Args:
        layers: of a rank, in the order of backwards. buckets: in theirs: the layers of each, and the bytes that travel.
    """
    found, done, waiting, now = dict[int, int](), set[int](), deque(buckets), 0
    for layer in layers:
        found[layer] = now
        done.add(layer)
        while waiting and waiting[0][0] <= done:
            _, now = waiting.popleft()
    return found


@dataclass(frozen=True)
class StepPeak:
    """Bytes at the moment of a step when a pipeline rank needs most, above weights, gradients and optimizer state.

    Attributes:
        kept: what forwards have left for their backwards.
        working: what the computation under way needs beside that.
        messages: tensors that wait, or are on their way from and to other stages, or to replicas that own them.
    """

    kept: int
    working: int
    messages: int

    @property
    def total(self) -> int:
        return self.kept + self.working + self.messages


def step_peaks(
    schedule: Schedule, bounds: Sequence[range], costs: PipelineCosts, exchanged: Sequence[Travelling] = ()
) -> list[StepPeak]:
    """Of each pipeline rank.

    Args:
        bounds: the layers of each chunk.
        exchanged: of each, what travels to and from those who own rows.
    """
    units = costs.unit_memory(bounds, schedule.placement, beside_of_layers(exchanged))
    behind = [each.behind for each in exchanged] or [0] * schedule.ranks
    return [_peak(schedule, rank, units, each) for rank, each in enumerate(behind)]


def beside_of_layers(exchanged: Iterable[Travelling]) -> dict[int, int]:
    """`Travelling.beside` of all ranks' layers."""
    return {layer: size for each in exchanged for layer, size in each.beside.items()}


def _peak(schedule: Schedule, rank: int, units: Sequence[UnitMemory], exchanged: int) -> StepPeak:
    found = moments(schedule, rank, units, exchanged)
    needed = [(each.kept, each.working, each.messages) for each in found]
    return StepPeak(*map(round, max(needed, key=sum)))


def graphs_bytes(schedule: Schedule, rank: int, bounds: Sequence[range], costs: PipelineCosts) -> int:
    """What the graphs of layers take on a rank from their first replays on, see graphs.py: a pool for each of the
    micro-batches that are under way at once, and one for weight gradients.

    Args: as of `step_peaks`.
    """
    total = 0
    for chunk, slots in micro_batches_under_way(schedule, rank).items():
        weights = [costs.layers[number].working[2] for number in bounds[chunk]]
        total += slots * _pool_bytes(bounds[chunk], costs.layers) + max(weights, default=0)
    return total


def _pool_bytes(span: range, layers: Sequence[LayerCost]) -> int:
    """At the fullest moment of the pass in which graphs are made. What forwards and first parts of backwards leave
    stays, and so do outputs, and gradients of inputs."""
    kept = peak = 0
    for number in span:
        peak = max(peak, kept + layers[number].working[0])
        kept += layers[number].held + layers[number].waiting
    for number in reversed(span):
        peak = max(peak, kept + layers[number].working[1])
        before = layers[number - 1] if number else None
        kept += layers[number].deferred_bytes + (before.waiting if before is not None and before.gradient else 0)
    return max(peak, kept)
