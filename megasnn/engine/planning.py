"""From the configuration to the plan of a pipeline, and the costs of layers that `--layer-costs` names."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from megasnn.batching import micro_batches_of
from megasnn.config import PretrainConfig
from megasnn.grid import Grid
from megasnn.layers import BuildContext
from megasnn.models.description import ModelDescription
from megasnn.parallel.agreement import broadcast_object
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.cost_model import PipelineCosts
from megasnn.pipeline.plan import PipelinePlan, PipelineRequest, plan_pipeline
from megasnn.planner.analysis import read, whose
from megasnn.planner.bounds import Bounds
from megasnn.planner.cluster import Cluster
from megasnn.planner.layout import Layout
from megasnn.schedule.partition import layout_to_bounds
from megasnn.schedule.passes import NEVER
from megasnn.telemetry.memory import device_name


def plan_of(
    config: PretrainConfig, model: ModelDescription, context: BuildContext, state: ParallelState, windows: int
) -> PipelinePlan:
    """Plans layers and placement of each chunk, and the schedules. Collective over the world.

    Args:
        windows: number of them in which each sample is shown.
    Raises:
        ValueError: on every rank, what the schedule cannot place or keep, or a `--layer-costs` that does not serve.
    """
    training, parallel = config.training, config.parallel
    replicas = state.data.size
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
    costs = None
    if parallel.layer_costs is not None:
        here, device = int(os.environ.get("LOCAL_WORLD_SIZE", state.world.size)), device_name(state.device)
        costs = broadcast_object(state.world, lambda: planned_costs(config, state.grid, here, device))
    return plan_pipeline(model, request, context, state, costs)


def planned_costs(config: PretrainConfig, grid: Grid, ranks_of_node: int, machine: str) -> PipelineCosts:
    """Reads the costs of `--layer-costs` for a grid, as the planner has them: the same order of actions follows.

    Args:
        machine: the device of this rank, as costs files name it.
    Raises:
        ValueError: a file that cannot be read, or of another model or device; one without seconds, or without a size.
    """
    path = config.parallel.layer_costs
    assert path is not None, "it was asked for"
    named, advice = f"--layer-costs {path}", "measure it here (tools/plan.py --measure), or leave the flag out"
    analysis = read(Path(path))
    if (other := whose(analysis, config)) is not None:
        raise ValueError(f"{named} is {other}; {advice}")
    if analysis.machine is None or not analysis.timed:
        raise ValueError(f"{named} has no seconds: it was made without --measure; {advice}")
    if analysis.machine.name != machine:
        raise ValueError(f"{named} was measured on {analysis.machine.name}, and this is {machine}; {advice}")
    cluster = Cluster(grid.world_size, ranks_of_node, analysis.machine)
    layout = Layout(grid, config.parallel.context_cut(config.training.micro_batch_size))
    try:
        return Bounds(analysis, config, cluster).costs(layout)
    except ValueError as error:
        raise ValueError(f"{named} does not have this layout: {error}; {advice}") from None
