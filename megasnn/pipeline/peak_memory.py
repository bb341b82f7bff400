from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from megasnn.pipeline.cost_model import LayerCost, PipelineCosts
from megasnn.schedule import Kind, Schedule
from megasnn.schedule.actions import COMPUTE, FINISHING, PROPAGATING, Action, crosses
from megasnn.schedule.passes import refine, with_recompute

MB = 10**6  # bytes


@dataclass(frozen=True)
class SegmentMemory:
    """Bytes for one segment (one layer or none) and one micro-batch.

    Attributes:
        resident: from forward to backward.
        entering: the same with recomputation.
        working: peak during a computation above the memory before it, with input and output gradient.
        deferred: from input gradient to weight gradient.
        transfers: messages with output and output gradient.
        cast: cast weights, stored during a step.
    """

    resident: int
    entering: int
    working: Mapping[Kind, int]
    deferred: int
    recompute_seconds: float
    transfers: int
    cast: int


def segment_memory(costs: PipelineCosts, segments: Sequence[range]) -> list[SegmentMemory]:
    """`segments` hold one layer or none."""
    memories = []
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
            # In place of the output there is its gradient.
            Kind.RECOMPUTE: before.output + forward,
            # The saved tensors are still there during the weight gradient, unlike in a backward in two parts.
            Kind.BACKWARD: gradient + max(inputs, weights + layer.deferred - layer.held),
            Kind.INPUT_GRADIENT: gradient + inputs,
            Kind.WEIGHT_GRADIENT: weights,
        }
        memory = SegmentMemory(
            resident=layer.held,
            entering=before.message + layer.found,
            working=working,
            deferred=layer.deferred,
            recompute_seconds=layer.forward,
            transfers=behind.message + behind.gradient,
            cast=layer.cast,
        )
        memories.append(memory)
    return memories


class Moment(NamedTuple):
    """A rank's bytes during a computation.

    Attributes:
        stashed: saved for backward, and cast weights.
        working: other tensors.
        messages: one sent and one posted for each boundary with another rank; after a step, the exchange with other
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
    """A rank's memory during each computation, then during the gradient exchange.

    Args:
        exchanged: bytes sent to and from shard owners, after all computations.
    """
    order = schedule.actions[rank]
    recomputed = {(segment, m) for segment, kind, m in order if kind is Kind.RECOMPUTE}
    cast = sum(segments[number].cast for number in schedule.segments_of(rank))
    messages = _message_bytes(schedule, rank, segments)
    stashed = cast
    for action in order:
        segment, kind, m = action
        memory = segments[segment]
        is_recomputed = (segment, m) in recomputed
        if kind is Kind.FORWARD and is_recomputed:
            stashed += memory.entering
        if kind in COMPUTE:
            yield Moment(action, stashed, memory.working[kind], messages)
        if kind is Kind.FORWARD and not is_recomputed:
            stashed += memory.resident
        elif kind is Kind.RECOMPUTE:
            stashed += memory.resident - memory.entering
        elif kind is Kind.INPUT_GRADIENT:
            stashed -= memory.resident - memory.deferred
        elif kind in PROPAGATING:
            stashed -= memory.resident
        elif kind is Kind.WEIGHT_GRADIENT:
            stashed -= memory.deferred
    if order and exchanged:
        yield Moment(order[-1], cast, 0, exchanged)


def _message_bytes(schedule: Schedule, rank: int, segments: Sequence[SegmentMemory]) -> int:
    """One sent and one posted for each boundary with another rank."""
    placement = schedule.placement
    messages = 0
    for number in range(schedule.segments):
        if crosses(placement, number) and rank in placement[number : number + 2]:
            messages += segments[number].transfers
    return messages


def peak_moments(
    schedule: Schedule,
    bounds: Sequence[range],
    costs: PipelineCosts,
    exchanged: Sequence[int] = (),
    has_graphs: bool = False,
) -> list[Moment]:
    """Each pipeline rank's peak, above weights, gradients and optimizer state.

    Args:
        exchanged: bytes sent to and from shard owners, for each rank.
        has_graphs: with CUDA graphs, where the first step, without them, may need more.
    """
    counts = [max(1, len(span)) for span in bounds]
    parts: list[range] = []
    for span in bounds:
        parts += [range(number, number + 1) for number in span] or [span]
    segments = segment_memory(costs, parts)
    # The layers of a chunk run one after another, like segments.
    refined = refine(schedule, counts) if max(counts) > 1 else schedule
    peaks = []
    for rank in range(schedule.ranks):
        size = exchanged[rank] if exchanged else 0
        peak = max(moments(refined, rank, segments, size), key=lambda moment: moment.total)
        if has_graphs:
            chunks = []
            for end, count in zip(accumulate(counts), counts, strict=True):
                chunks.append(segments[end - count : end])
            peak = max(peak, _graph_moment(schedule, rank, chunks), key=lambda moment: moment.total)
        peaks.append(peak)
    return peaks


def _graph_moment(schedule: Schedule, rank: int, chunks: Sequence[Sequence[SegmentMemory]]) -> Moment:
    """A rank's bytes once all CUDA graphs are captured. A chunk has a pool for each micro-batch under way."""
    order = schedule.actions[rank]
    stashed = 0
    for chunk in schedule.segments_of(rank):
        # Backward replays over all saved tensors, so they stay, as do the tensors left for the weight gradients. Both
        # together are within 3 % of the memory measured on an H200: temporary tensors fit in between.
        pool = sum(layer.resident + layer.deferred for layer in chunks[chunk])
        stashed += most_under_way(order, chunk) * pool
        stashed += sum(layer.cast for layer in chunks[chunk])
    return Moment(order[0], stashed, 0, _message_bytes(schedule, rank, [layers[-1] for layers in chunks]))


def most_under_way(order: Sequence[Action], segment: int) -> int:
    """Most micro-batches between a segment's forward and the end of its backward."""
    under_way = 0
    most = 0
    for action in order:
        if action.segment == segment and action.kind is Kind.FORWARD:
            under_way += 1
            most = max(most, under_way)
        elif action.segment == segment and action.kind in FINISHING:
            under_way -= 1
    return most


def within_budget(
    schedule: Schedule, segments: Sequence[SegmentMemory], budget: float, exchanged: Sequence[int] = ()
) -> frozenset[int]:
    """Chooses segments to recompute, so that every rank keeps the budget.

    Args:
        schedule: refined to segments, without recomputation.
        budget: bytes on each rank.
        exchanged: bytes exchanged with shard owners, on each rank.
    Raises:
        ValueError: a rank exceeds the budget with all segments recomputed.
    """
    chosen = frozenset[int]()
    least = 0

    def saved_per_second(segment: int) -> float:
        memory = segments[segment]
        return (memory.resident - memory.entering) / max(memory.recompute_seconds, 1e-9)

    for rank in range(schedule.ranks):
        useful = [segment for segment in schedule.segments_of(rank) if saved_per_second(segment) > 0]
        useful.sort(key=saved_per_second)
        added = frozenset[int]()
        size = exchanged[rank] if exchanged else 0
        need = _need(schedule, rank, segments, added, size)
        # Greedy: the last segment saves most bytes per second.
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
    orders = list(schedule.actions)
    orders[rank] = with_recompute(schedule.actions[rank], lambda segment, m: segment in chosen)
    changed = replace(schedule, actions=tuple(orders))
    return max((moment.total for moment in moments(changed, rank, segments, exchanged)), default=0)
