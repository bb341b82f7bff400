"""Peak memory of a step on each pipeline rank, and the forwards that a budget has computed again."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megasnn.pipeline.cost_model import LayerCost, PipelineCosts
from megasnn.schedule import Kind, Schedule
from megasnn.schedule.actions import COMPUTE, PROPAGATING, Action, crosses
from megasnn.schedule.passes import refine, with_recompute

MB = 10**6  # bytes


@dataclass(frozen=True)
class SegmentMemory:
    """Bytes of a segment, a layer or none, for one micro-batch.

    Attributes:
        resident: kept by its forward. entering: the same where it is computed again.
        working: peak of a computation above the memory before it, with its input and the gradient of its output.
        deferred: left by an input gradient for the weight gradient.
        again: seconds to compute the forward again.
        transfers: its output and the output's gradient, on their way to and from another rank.
        cast: its weights in another type, which a step makes once and keeps.
    """

    resident: int
    entering: int
    working: Mapping[Kind, int]
    deferred: int
    again: float
    transfers: int
    cast: int


def segment_memory(costs: PipelineCosts, segments: Sequence[range]) -> list[SegmentMemory]:
    """Bytes of segments of one layer each, or of none.

    Args:
        segments: layers of each.
    """
    found = []
    layers = costs.layers
    for span in segments:
        before = layers[span.start - 1] if span.start else LayerCost()
        # A segment without a layer hands its input on.
        layer = layers[span.start] if span else LayerCost()
        behind = layer if span else before
        gradient = behind.output if behind.gradient and span.stop < len(layers) else 0
        forward, inputs, weights = layer.working
        working = {
            Kind.FORWARD: before.output + forward,
            # The output is not made again; its gradient waits instead.
            Kind.RECOMPUTE: before.output + forward,
            # In a backward in one part the weight gradient comes while the forward's tensors are still there.
            Kind.BACKWARD: gradient + max(inputs, weights + layer.deferred - layer.held),
            Kind.INPUT_GRADIENT: gradient + inputs,
            Kind.WEIGHT_GRADIENT: weights,
        }
        memory = SegmentMemory(
            resident=layer.held,
            entering=before.message + layer.found,
            working=working,
            deferred=layer.deferred,
            again=layer.forward,
            transfers=behind.message + behind.gradient,
            cast=layer.cast,
        )
        found.append(memory)
    return found


class Moment(NamedTuple):
    """Bytes that a rank needs during a computation.

    Attributes:
        stashed: by forwards for their backwards, and weights in another type.
        working: by the computation beside that.
        messages: of each boundary with another rank, one under way and one posted; at the end, what travels between
            replicas.
    """

    action: Action
    stashed: int
    working: int
    messages: int

    @property
    def total(self) -> int:
        return self.stashed + self.working + self.messages


def moments(schedule: Schedule, rank: int, segments: Sequence[SegmentMemory], exchanged: int = 0) -> Iterator[Moment]:
    """All computations of a rank, and the exchange of gradients behind them.

    Args:
        segments: of each chunk of the schedule.
        exchanged: bytes that travel to and from the owners of shards, behind all computations.
    """
    order = schedule.actions[rank]
    placement = schedule.placement
    again = {(segment, m) for segment, kind, m in order if kind is Kind.RECOMPUTE}
    cast = sum(segments[number].cast for number in schedule.segments_of(rank))
    messages = 0
    for number in range(schedule.segments):
        if crosses(placement, number) and rank in placement[number : number + 2]:
            messages += segments[number].transfers
    stashed = cast
    for action in order:
        segment, kind, m = action
        memory = segments[segment]
        is_again = (segment, m) in again
        if kind is Kind.FORWARD and is_again:
            stashed += memory.entering
        if kind in COMPUTE:
            yield Moment(action, stashed, memory.working[kind], messages)
        if kind is Kind.FORWARD and not is_again:
            stashed += memory.resident
        elif kind is Kind.RECOMPUTE:
            stashed += memory.resident - memory.entering
        elif kind in PROPAGATING:
            stashed -= memory.resident - (memory.deferred if kind is Kind.INPUT_GRADIENT else 0)
        elif kind is Kind.WEIGHT_GRADIENT:
            stashed -= memory.deferred
    if order and exchanged:
        yield Moment(order[-1], cast, 0, exchanged)


def peak_moments(
    schedule: Schedule, bounds: Sequence[range], costs: PipelineCosts, exchanged: Sequence[int] = ()
) -> list[Moment]:
    """Moment of a step at which each pipeline rank needs most, above weights, gradients and optimizer state.

    Args:
        bounds: layers of each chunk of the schedule.
        exchanged: on each rank, bytes that travel to and from the owners of shards.
    """
    counts = [max(1, len(span)) for span in bounds]
    if max(counts) > 1:  # a chunk's layers run one after another, as segments do
        schedule = refine(schedule, counts)
        parts: list[range] = []
        for span in bounds:
            parts += [range(number, number + 1) for number in span] or [span]
        bounds = parts
    segments = segment_memory(costs, bounds)
    peaks = []
    for rank in range(schedule.ranks):
        size = exchanged[rank] if exchanged else 0
        peaks.append(max(moments(schedule, rank, segments, size), key=lambda moment: moment.total))
    return peaks


def within_budget(
    schedule: Schedule, segments: Sequence[SegmentMemory], budget: float, exchanged: Sequence[int] = ()
) -> frozenset[int]:
    """Chooses segments whose forwards are computed again, so that no rank needs more than its budget.

    Greedy: segments that save most bytes for a second of their time come first.

    Args:
        schedule: of segments, complete, in which nothing is computed again.
        budget: bytes that each rank may need.
        exchanged: on each rank, bytes that travel to and from the owners of shards.
    Raises:
        ValueError: more is needed even with all of them.
    """
    chosen = frozenset[int]()
    least = 0

    def saved_per_second(segment: int) -> float:
        memory = segments[segment]
        return (memory.resident - memory.entering) / max(memory.again, 1e-9)

    for rank in range(schedule.ranks):
        useful = [segment for segment in schedule.segments_of(rank) if saved_per_second(segment) > 0]
        useful.sort(key=saved_per_second)
        added = frozenset[int]()
        size = exchanged[rank] if exchanged else 0
        need = _need(schedule, rank, segments, added, size)
        while need > budget and useful:
            added |= {useful.pop()}
            need = _need(schedule, rank, segments, added, size)
        chosen |= added
        least = max(least, need)
    if least > budget:
        raise ValueError(
            f"--memory-budget {budget / MB:g} cannot be kept with all forwards computed again: the least is "
            f"--memory-budget {math.ceil(least / MB)}; or use a smaller --micro-batch-size, or "
            "--pipeline-schedule v-half or v-min"
        )
    return chosen


def _need(
    schedule: Schedule, rank: int, segments: Sequence[SegmentMemory], chosen: Collection[int], exchanged: int
) -> int:
    """Bytes of a rank where the forwards of these segments are computed again."""
    orders = list(schedule.actions)
    orders[rank] = with_recompute(schedule.actions[rank], lambda segment, m: segment in chosen)
    changed = replace(schedule, actions=tuple(orders))
    return max((moment.total for moment in moments(changed, rank, segments, exchanged)), default=0)
