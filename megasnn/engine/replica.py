"""Building of this rank's part of a model: chunks, gradients, ties and the executor, put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

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
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.chunk import PipelineChunk, build_chunks
from megasnn.pipeline.executor import PipelineExecutor
from megasnn.pipeline.p2p import Boundaries, Transfers
from megasnn.pipeline.plan import PipelinePlan
from megasnn.pipeline.ties import Ties
from megasnn.schedule.plan import ScheduleChoice


def build_replica(
    config: PretrainConfig,
    description: ModelDescription,
    built: Sequence[Built],
    context: BuildContext,
    plan: PipelinePlan,
    wants_to_stop: Callable[[], bool],
) -> DistributedModel:
    """Builds this rank's part of a model. Collective.

    Args:
        built: the layers of the whole model, with this context; only those of this rank get memory.
    """
    state = context.state
    schedules = plan.schedules
    weights = None
    if state.dp_shard.size > 1:
        weights = GatheredWeights(state.dp_shard, state.dp_shard_grad, context.cast_weights.give)
    here = [index for index, rank in enumerate(schedules.placement) if rank == state.pp.rank]
    shard = None if weights is None else (plan.segment_bounds, weights.shard)
    chunks = build_chunks(description, plan.bounds, here, context, state.device, config.training.seed, built, shard)

    def local_part(entry: ShardedTensor) -> ShardedTensor:
        return entry if weights is None else weights.local_part(entry)

    tensors = [local_part(entry) for chunk in chunks.values() for entry in chunk.sharded_tensors()]
    copies = [local_part(entry) for chunk in chunks.values() for entry in chunk.copied_tensors()]
    modules = [module for chunk in chunks.values() for module in chunk.modules()]
    segments = _segments(chunks, plan)
    buckets = _gradient_buckets(config, modules, chunks, segments, state, schedules, weights)
    context.weight_gradients.report_to(buckets.accumulated)
    owned = [buckets.owned(entry) for entry in tensors]
    ties = None
    if description.ties:
        gradient = buckets.gradient
        ties = Ties(description, plan.bounds, schedules.placement, chunks, state.pp, state.device, gradient, local_part)
    names = [entry.name for entry in description.tensors if entry.is_parameter]
    loss = MicroBatchLoss(config, description.task, context.counts_logits, state.device)
    checks = DeviceChecks(state.device)
    transfers = None
    if state.pp.size > 1:
        boundaries = Boundaries(description, context, built)
        transfers = Transfers(segments, schedules.segment_placement, state, boundaries)
    gives_logits = len(schedules.placement) - 1 in chunks
    return DistributedModel(
        description=description,
        context=context,
        plan=plan,
        chunks=chunks,
        takes_images=0 in chunks,
        gives_logits=gives_logits,
        reports=gives_logits and state.tp.rank == 0 and context.counts_logits,
        tensors=tensors,
        copies=copies,
        owned=owned,
        norms=[module for module in modules if isinstance(module, ParallelBatchNorm)],
        gradient_buckets=buckets,
        gradient_norm=GradientNorm(names, owned, state.device),
        ties=ties,
        loss=loss,
        executor=PipelineExecutor(segments, state, transfers, loss, buckets, weights),
        checks=checks,
        wants_to_stop=wants_to_stop,
    )


def _segments(chunks: Mapping[int, PipelineChunk], plan: PipelinePlan) -> Mapping[int, PipelineChunk]:
    """Segments of this rank by number: its chunks, or their layers where the schedule is refined."""
    schedules = plan.schedules
    if schedules.segments_per_chunk is None:
        return chunks
    first = _first_segments(schedules)
    segments = {}
    for index, chunk in chunks.items():
        for number in range(first[index], first[index + 1]):
            segments[number] = chunk.part(plan.segment_bounds, number)
    return segments


def _first_segments(schedules: ScheduleChoice) -> list[int]:
    """Number of the first segment of each chunk, and behind them the number of all segments."""
    return [0, *accumulate(schedules.segment_counts)]


def _gradient_buckets(
    config: PretrainConfig,
    modules: Sequence[nn.Module],
    chunks: Mapping[int, PipelineChunk],
    segments: Mapping[int, PipelineChunk],
    state: ParallelState,
    schedules: ScheduleChoice,
    weights: GatheredWeights | None,
) -> GradientBuckets:
    # Gradients that are scattered after each micro-batch are reduced after each segment. The others of a chunk are
    # complete when its first segment's are.
    scatters = schedules.weights is not None and bool(schedules.weights.scattered)
    reduced = segments
    if not scatters:
        first = _first_segments(schedules)
        reduced = {first[index]: chunk for index, chunk in chunks.items()}
    weighted = [module for module in modules if isinstance(module, (ParallelConv, ParallelLinear))]
    return GradientBuckets(
        [(number, part.sharded_tensors() + part.copied_tensors()) for number, part in reduced.items()],
        state.dp_replicate_cp,
        state.tp,
        additions={module.weight: facts(module).calls for module in weighted},
        shards_have_owners=config.parallel.use_distributed_optimizer,
        weights=weights,
        scattered=scatters,
    )
