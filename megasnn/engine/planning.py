"""From the configuration to the plan of a pipeline."""

from __future__ import annotations

from dataclasses import replace

from megasnn.batching import micro_batches_of
from megasnn.config import PretrainConfig
from megasnn.layers import BuildContext
from megasnn.models.description import ModelDescription
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.plan import PipelinePlan, PipelineRequest, plan_pipeline
from megasnn.schedule.partition import layout_to_bounds
from megasnn.schedule.passes import NEVER


def plan_of(
    config: PretrainConfig, model: ModelDescription, context: BuildContext, state: ParallelState, windows: int
) -> PipelinePlan:
    """Plans layers and placement of each chunk, and the schedules. Collective over the world.

    Args:
        windows: number of them in which each sample is shown.
    Raises:
        ValueError: on every rank, what the schedule cannot place or keep.
    """
    training, parallel = config.training, config.parallel
    replicas = state.dp.size
    shares = {len(micro_batches_of(training.micro_batches, replicas, each)) for each in (0, replicas - 1)}
    counts = [windows * each for each in sorted(shares, reverse=True)]
    if training.evaluate_only:  # no activation is kept, so none is recomputed; there are no other steps
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
    )
    return plan_pipeline(model, request, context, state)
