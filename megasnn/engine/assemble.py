"""Assembles a DistributedModel on this rank: chunks, gradient buckets, executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain

from torch import nn

from megasnn.common.checks import DeviceChecks
from megasnn.config import PretrainConfig
from megasnn.engine.loss import MicroBatchLoss
from megasnn.engine.model import DistributedModel
from megasnn.layers import BuildContext, ParallelBatchNorm, ParallelConv, ParallelLinear
from megasnn.layers.facts import facts
from megasnn.models.description import Built, ModelDescription
from megasnn.optim.norms import GradientNorm
from megasnn.parallel.fsdp import GatheredWeights
from megasnn.parallel.gradient_buckets import GradientBuckets
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel.sync_batch_norm import RunningStatistics
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.chunk import PipelineChunk, build_chunks
from megasnn.pipeline.executor import PipelineExecutor
from megasnn.pipeline.p2p import Boundaries, Transfers
from megasnn.pipeline.plan import PipelinePlan
from megasnn.pipeline.ties import Ties


def assemble_model(
    config: PretrainConfig,
    description: ModelDescription,
    built: Sequence[Built],
    context: BuildContext,
    plan: PipelinePlan,
    wants_to_stop: Callable[[], bool],
) -> DistributedModel:
    """Builds this rank's chunks, and all that trains them. Collective.

    Args:
        built: all layers in this context, without memory. Only this rank's get memory.
    """
    state = context.state
    schedules = plan.schedules
    weights = None
    shard = None
    if state.dp_shard.size > 1:
        weights = GatheredWeights(state.dp_shard, state.dp_shard_grad, context.cast_weights.substitute)
        shard = (plan.segment_bounds, weights.shard)
    here = [index for index, rank in enumerate(schedules.placement) if rank == state.pp.rank]
    chunks = build_chunks(description, plan.bounds, here, context, state.device, config.training.seed, built, shard)
    # The first segment of each chunk, and at the end the number of segments.
    first_segments = [0, *accumulate(schedules.segment_counts)]
    segments = _segments(chunks, plan, first_segments)
    parts: dict[int, list[ShardedTensor]] = {}
    modules: list[nn.Module] = []
    for index, chunk in chunks.items():
        parts[index] = chunk.described_tensors()
        if weights is not None:
            parts[index] = [weights.local_part(entry) for entry in parts[index]]
        modules += chunk.modules()
    entries = [*chain.from_iterable(parts.values())]
    tensors = [entry for entry in entries if not entry.is_copy]
    norms = [module for module in modules if isinstance(module, ParallelBatchNorm)]
    buckets = _gradient_buckets(config, plan, chunks, segments, first_segments, modules, state, weights)
    # Layers add weight gradients outside of autograd (layers/weight_grad.py). Its hooks do not see them, so the queue
    # reports each one to its bucket.
    context.weight_gradients.report_to(buckets.accumulated)
    owned = [buckets.owned_part(entry) for entry in tensors]
    ties = None
    if description.ties:
        gradient = buckets.gradient_of_part
        ties = Ties(description, plan.bounds, schedules.placement, parts, norms, state.pp, state.device, gradient)
    transfers = None
    if state.pp.size > 1:
        boundaries = Boundaries(description, context, built)
        transfers = Transfers(segments, schedules.segment_placement, state, boundaries)
    loss = MicroBatchLoss(config, description.task, context.counts_logits, state.device)
    gives_logits = len(schedules.placement) - 1 in chunks
    # A parameter's slot in the norm is its place in this list: that of the whole model, the same on every rank.
    names = [entry.name for entry in description.tensors if entry.is_parameter]
    return DistributedModel(
        description=description,
        context=context,
        plan=plan,
        chunks=chunks,
        takes_inputs=0 in chunks,
        gives_logits=gives_logits,
        reports=gives_logits and state.tp.rank == 0 and context.counts_logits,
        tensors=tensors,
        copies=[entry for entry in entries if entry.is_copy],
        owned=owned,
        norms=norms,
        gradient_buckets=buckets,
        gradient_norm=GradientNorm(names, owned, state.device),
        running_statistics=RunningStatistics(norms, state.dp, None if ties is None else ties.statistics_of_owners),
        ties=ties,
        loss=loss,
        executor=PipelineExecutor(segments, state, transfers, loss, buckets, weights),
        checks=DeviceChecks(state.device),
        wants_to_stop=wants_to_stop,
    )


def _segments(
    chunks: Mapping[int, PipelineChunk], plan: PipelinePlan, first_segments: Sequence[int]
) -> Mapping[int, PipelineChunk]:
    """The chunks' segments by their number in the schedule. Without finer ones, each chunk is a segment."""
    if plan.schedules.segments_per_chunk is None:
        return chunks
    segments = {}
    for index, chunk in chunks.items():
        for number in range(first_segments[index], first_segments[index + 1]):
            segments[number] = chunk.part(plan.segment_bounds, number)
    return segments


def _gradient_buckets(
    config: PretrainConfig,
    plan: PipelinePlan,
    chunks: Mapping[int, PipelineChunk],
    segments: Mapping[int, PipelineChunk],
    first_segments: Sequence[int],
    modules: Sequence[nn.Module],
    state: ParallelState,
    weights: GatheredWeights | None,
) -> GradientBuckets:
    # Gradients scattered after each micro-batch are reduced after each segment. Otherwise a chunk is reduced when its
    # first segment, the last in backward, is complete.
    scatters = plan.schedules.weights is not None and bool(plan.schedules.weights.scattered)
    reduced = segments
    if not scatters:
        reduced = {first_segments[index]: chunk for index, chunk in chunks.items()}
    # A layer called several times in a forward adds as many gradients, and its bucket waits for all of them.
    additions = {}
    for module in modules:
        if isinstance(module, (ParallelConv, ParallelLinear)):
            additions[module.weight] = facts(module).calls
    return GradientBuckets(
        [(number, part.described_tensors()) for number, part in reduced.items()],
        state.dp_replicate_cp,
        state.tp,
        additions=additions,
        zero1=config.parallel.use_distributed_optimizer,
        weights=weights,
        scattered=scatters,
    )
