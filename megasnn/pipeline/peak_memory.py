"""Peak memory of a step on each pipeline rank, from its schedule and the costs of the layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megasnn.pipeline.cost_model import LayerCost, PipelineCosts
from megasnn.schedule import Kind, Schedule
from megasnn.schedule.actions import COMPUTE, PROPAGATING, RECEIVES, SENDS, Action
from megasnn.schedule.memory import micro_batches_under_way
from megasnn.schedule.passes import refine
from megasnn.schedule.receives import known_arrivals, peers, received_behind


@dataclass(frozen=True)
class UnitMemory:
    """Bytes of a unit, a layer or none, for one micro-batch.

    Attributes:
        held: kept by its forward. entering: the same where it is computed again.
        working: most that a computation needs above what is there before it, its input or the gradient of its output
            included.
        deferred: left by an input gradient for the weight gradient.
        again: seconds to compute the forward again.
        output: its output while that waits for the unit that takes it.
        message, gradient: output and its gradient on the way to another rank; no gradient where none is needed.
        cast: its weights in another type, which a step makes once and keeps.
    """

    held: int
    entering: int
    working: Mapping[Kind, int]
    deferred: int
    again: float
    output: int
    message: int
    gradient: int
    cast: int

    @property
    def waiting_gradient(self) -> int:
        """Gradient of its output, while that waits."""
        return self.output if self.gradient else 0


def unit_memory(costs: PipelineCosts, units: Sequence[range]) -> list[UnitMemory]:
    """Bytes of units of one layer each, or of none. Args: units: layers of each."""
    found, layers = [], costs.layers
    for span in units:
        before = layers[span.start - 1] if span.start else LayerCost(0, 0, 0, output=0)
        # A unit without a layer hands its input on.
        layer = layers[span.start] if span else LayerCost(0, 0, 0)
        behind = layer if span else before
        gradient = behind.waiting if behind.gradient and span.stop < len(layers) else 0
        forward, inputs, weights = layer.working
        # In a backward in one part the weight gradient comes while all that the forward has kept is there.
        whole = max(inputs, weights + layer.deferred_bytes - layer.held)
        working = {
            Kind.FORWARD: before.waiting + forward,
            Kind.RECOMPUTE: before.waiting + (layer.working_again or forward),
            Kind.BACKWARD: gradient + whole,
            Kind.INPUT_GRADIENT: gradient + inputs,
            Kind.WEIGHT_GRADIENT: weights,
        }
        sizes = behind.waiting, behind.message, behind.gradient, layer.cast
        entering = before.message + layer.found
        found.append(UnitMemory(layer.held, entering, working, layer.deferred_bytes, layer.recompute_seconds, *sizes))
    return found


class Moment(NamedTuple):
    """Bytes that a rank needs during a computation.

    Attributes:
        kept: by forwards for their backwards, and weights in another type.
        working: by the computation beside that.
        messages: outputs and gradients that wait for somebody or are on their way, and what travels between replicas.
    """

    action: Action
    kept: int
    working: int
    messages: int

    @property
    def total(self) -> int:
        return self.kept + self.working + self.messages


def moments(schedule: Schedule, rank: int, units: Sequence[UnitMemory], exchanged: int = 0) -> Iterator[Moment]:
    """All computations of a rank, and the exchange of gradients behind them.

    Args:
        units: of each chunk of the schedule.
        exchanged: bytes that travel to and from those who own rows, behind all computations.
    """
    row, last = schedule.actions[rank], schedule.chunks - 1
    again = {(unit, m) for unit, kind, m in row if kind is Kind.RECOMPUTE}
    cast = sum(unit.cast for unit, place in zip(units, schedule.placement, strict=True) if place == rank)
    kept, waiting, on_the_way = cast, 0, 0
    arrivals, one = known_arrivals(schedule, rank), [0] * schedule.chunks
    sent: dict[int, deque[int]] = {peer: deque() for peer in peers(schedule.placement, rank)}
    arrived = dict.fromkeys(sent, 0)
    for index, action in enumerate(row):
        unit, kind, m = action
        memory, is_again = units[unit], (unit, m) in again
        before, gradient = (units[unit - 1].output, units[unit - 1].waiting_gradient) if unit else (0, 0)
        if kind is Kind.FORWARD:
            waiting -= before
            kept += memory.entering if is_again else 0
        elif kind in PROPAGATING and unit < last:
            waiting -= memory.waiting_gradient
        if kind in COMPUTE:
            coming = sum(_size(units, each) for each in received_behind(row, index, one))
            yield Moment(action, kept, memory.working[kind], waiting + coming + on_the_way)
        if kind is Kind.FORWARD:
            kept += 0 if is_again else memory.held
            waiting += memory.output if unit < last else 0
        elif kind is Kind.RECOMPUTE:
            kept += memory.held - memory.entering
        elif kind in PROPAGATING:
            kept -= memory.held - (memory.deferred if kind is Kind.INPUT_GRADIENT else 0)
            waiting += gradient
        elif kind is Kind.WEIGHT_GRADIENT:
            kept -= memory.deferred
        elif kind in SENDS:
            sent[schedule.placement[action.peer.chunk]].append(size := _size(units, action))
            on_the_way += size
            waiting -= memory.output if kind is Kind.SEND_FORWARD else gradient
        elif kind in RECEIVES:
            waiting += before if kind is Kind.RECV_FORWARD else memory.waiting_gradient
            peer = schedule.placement[action.peer.chunk]
            while arrived[peer] < arrivals[action]:
                on_the_way -= sent[peer].popleft()
                arrived[peer] += 1
    if row and exchanged:
        yield Moment(row[-1], cast, 0, exchanged)


def _size(units: Sequence[UnitMemory], transfer: Action) -> int:
    """Bytes of a transfer."""
    chunk, kind, _ = transfer
    if kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD):
        return units[chunk if kind is Kind.SEND_FORWARD else chunk - 1].message
    return units[chunk if kind is Kind.RECV_BACKWARD else chunk - 1].gradient


def peak_moments(
    schedule: Schedule, bounds: Sequence[range], costs: PipelineCosts, exchanged: Sequence[int] = ()
) -> list[Moment]:
    """Moment of a step at which each pipeline rank needs most, above weights, gradients and optimizer state.

    Args:
        bounds: layers of each chunk of the schedule.
        exchanged: on each rank, the bytes that travel to and from those who own rows.
    """
    counts = [max(1, len(span)) for span in bounds]
    if max(counts) > 1:  # a chunk's layers run one after another, as units do
        schedule = refine(schedule, counts)
        bounds = [part for span in bounds for part in ([range(i, i + 1) for i in span] or [span])]
    units, behind = unit_memory(costs, bounds), exchanged or [0] * schedule.ranks
    found = (moments(schedule, rank, units, size) for rank, size in enumerate(behind))
    return [max(of_rank, key=lambda moment: moment.total) for of_rank in found]


def graphs_bytes(schedule: Schedule, rank: int, bounds: Sequence[range], costs: PipelineCosts) -> int:
    """Bytes of the CUDA graphs of a rank's layers: a pool for each of the micro-batches that are under way at once, and
    one for weight gradients. Args: as of `peak_moments`."""
    total, layers = 0, costs.layers
    for chunk, slots in micro_batches_under_way(schedule, rank).items():
        kept = peak = 0  # what forwards and input gradients leave stays, and so do outputs, and gradients of inputs
        for number in bounds[chunk]:
            peak = max(peak, kept + layers[number].working[0])
            kept += layers[number].held + layers[number].waiting
        for number in reversed(bounds[chunk]):
            peak = max(peak, kept + layers[number].working[1])
            before = layers[number - 1] if number else LayerCost(0, 0, 0)
            kept += layers[number].deferred_bytes + (before.waiting if before.gradient else 0)
        total += slots * max(peak, kept) + max((layers[number].working[2] for number in bounds[chunk]), default=0)
    return total
