"""Pipeline stages: layers, seconds and bytes, and the idle time with equal stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts
from megasnn.pipeline.peak_memory import SegmentMemory, most_under_way, segment_memory
from megasnn.schedule import ChunkCost, Kind, chunk_costs, generate, simulate
from megasnn.schedule.actions import crosses
from megasnn.schedule.partition import placed_bounds

Placement = tuple[int, ...]
"""Pipeline rank of each chunk."""


class Stage(NamedTuple):
    """A pipeline rank's layers, and their costs for one micro-batch.

    Attributes:
        spans: layers by chunk.
        seconds: forward and backward, recompute included.
        backward: the backward's seconds.
        stashed: bytes saved for backward.
        deferred: bytes saved from an input gradient for a later weight gradient.
        working: the most that a layer's backward takes above `stashed`, and weights cast for products.
        messages: bytes to and from other ranks.
    """

    spans: tuple[range, ...]
    seconds: float
    backward: float
    stashed: int
    deferred: int
    working: int
    messages: int


@cache
def bounds_by_seconds(layers: tuple[LayerCost, ...], placement: Placement) -> tuple[range, ...]:
    """Layers by chunk, balanced by seconds."""
    return tuple(placed_bounds([layer.seconds for layer in layers], placement))


def balanced_stages(layers: tuple[LayerCost, ...], placement: Placement, recomputes: bool) -> list[Stage]:
    """By pipeline rank."""
    bounds = bounds_by_seconds(layers, placement)
    segments = segment_memory(PipelineCosts(layers, LinkCost()), [range(i, i + 1) for i in range(len(layers))])
    crossed = [chunk for chunk in range(len(placement)) if crosses(placement, chunk)]
    stages = []
    for rank in range(max(placement) + 1):
        spans = tuple(span for span, owner in zip(bounds, placement, strict=True) if owner == rank)
        messages = 0
        for chunk in crossed:
            if rank in placement[chunk : chunk + 2]:
                messages += segments[bounds[chunk].stop - 1].transfers
        stages.append(_stage(spans, layers, segments, messages, recomputes))
    return stages


def _stage(
    spans: tuple[range, ...],
    layers: Sequence[LayerCost],
    segments: Sequence[SegmentMemory],
    messages: int,
    recomputes: bool,
) -> Stage:
    forward = 0.0
    both = 0.0
    stashed = 0
    deferred = 0
    largest = 0
    cast = 0
    for span in spans:
        freed = 0
        for i in reversed(span):
            forward += layers[i].forward
            both += layers[i].seconds
            memory = segments[i]
            working = memory.working[Kind.BACKWARD]
            if recomputes:
                # A layer keeps its input alone, and all else for the time of its own backward.
                kept = memory.entering
                working += memory.resident
            else:
                kept = memory.resident
            # The backward of later layers has freed what they kept.
            largest = max(largest, working - freed)
            freed += kept
            stashed += kept
            deferred += memory.deferred
            cast += memory.cast
    again = 0.0
    if recomputes:
        for span in spans:
            # The last layer of a chunk goes backward right after its forward.
            for i in span[:-1]:
                again += layers[i].forward
    backward = again + both - forward
    return Stage(spans, forward + backward, backward, stashed, deferred, largest + cast, messages)


class EqualStages(NamedTuple):
    """A schedule on stages of equal time. Micro-batches by rank.

    Attributes:
        idle: a rank's idle time in a step, in multiples of a stage's time for one micro-batch.
        under_way: largest number from forward to weight gradient, as a mean of the rank's chunks.
    """

    idle: float
    stashed: Sequence[float]
    under_way: Sequence[float]


@cache
def equal_stages(
    name: str, stages: int, micro_batches: int, chunks: int, recomputes: bool, message: float
) -> EqualStages:
    """Simulates a schedule. Times are in multiples of a stage's time for one micro-batch.

    Args:
        name: the schedule's.
        chunks: per rank.
        message: time for one transfer.
    """
    # Forward, input gradient and weight gradient take one each.
    whole = 3 + recomputes
    stage = ChunkCost(1, 1 + recomputes, 1, whole * message, whole * message)
    costs_of = partial(chunk_costs, [stage] * stages)
    schedule = generate(name, stages, micro_batches, chunks, costs_of)
    result = simulate(schedule, costs_of(schedule.placement))
    under_way = []
    for rank, order in enumerate(schedule.actions):
        of_chunks = [most_under_way(order, chunk) for chunk in schedule.segments_of(rank)]
        under_way.append(sum(of_chunks) / len(of_chunks))
    return EqualStages(result.makespan / whole - micro_batches, result.peak_activations, under_way)
