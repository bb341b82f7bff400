"""From the configuration to the plan of a pipeline: what is asked for, and where the costs of layers come from."""

from __future__ import annotations

from dataclasses import replace

from megasnn.batching import micro_batches_of
from megasnn.config import PretrainConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.layers import BuildContext
from megasnn.models.description import ModelDescription
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.choose_schedule import PipelineRequest
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.plan import PipelinePlan, plan_pipeline
from megasnn.schedule.partition import layout_to_bounds
from megasnn.schedule.passes import NEVER


def wire_options(parallel: ParallelConfig) -> WireOptions:
    """How tensors travel between stages."""
    return WireOptions()


def plan_of(
    config: PretrainConfig, model: ModelDescription, context: BuildContext, state: ParallelState, windows: int
) -> PipelinePlan:
    """The layers and the place of each chunk, and the schedules. Collective over the world.

    Args:
        windows: in which each sample is shown.
    Raises:
        ValueError: on every rank, what the schedule cannot place or keep.
    """
    training, parallel = config.training, config.parallel
    counts = [windows * each for each in micro_batch_counts(training.micro_batches, state.data.size)]
    if training.evaluate_only:  # nothing is kept, and so nothing is computed again; there are no other steps
        parallel = replace(parallel, recompute=NEVER, memory_budget=None)
        counts = counts[:1]
    layout, units = parallel.layout, [layer.unit for layer in model.layers]
    request = PipelineRequest(
        schedule=parallel.pipeline_schedule,
        chunks_per_rank=parallel.chunks_per_rank,
        bounds=None if layout is None else tuple(layout_to_bounds(layout, units)),
        micro_batch_size=context.largest_share(training.micro_batch_size),
        micro_batches=tuple(counts),
        predicts=config.logging.profile_pipeline,
        recompute=parallel.recompute,
        memory_budget=None if parallel.memory_budget is None else 1e6 * parallel.memory_budget,
        scatters=parallel.weight_gradients == "scattered",
        rows_have_owners=parallel.use_distributed_optimizer,
    )
    return plan_pipeline(model, request, context, state, wire_options(parallel))


def micro_batch_counts(micro_batches: int, replicas: int) -> tuple[int, ...]:
    """How many of a global batch's micro-batches a replica may have, the largest number first."""
    counts = {len(micro_batches_of(micro_batches, replicas, replica)) for replica in (0, replicas - 1)}
    return tuple(sorted(counts, reverse=True))
