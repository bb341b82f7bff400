"""From the configuration to the plan of a pipeline: what is asked for, and where the costs of layers come from."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from megasnn.batching import micro_batches_of
from megasnn.config import PretrainConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.grid import Grid
from megasnn.layers import BuildContext
from megasnn.models.description import ModelDescription
from megasnn.parallel.agreement import broadcast_object
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.choose_schedule import PipelineRequest
from megasnn.pipeline.cost_model import PipelineCosts
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.plan import PipelinePlan, plan_pipeline
from megasnn.planner.analysis import read, whose
from megasnn.planner.bounds import Bounds
from megasnn.planner.cluster import Cluster
from megasnn.planner.layout import Layout
from megasnn.schedule.partition import layout_to_bounds
from megasnn.schedule.passes import NEVER
from megasnn.telemetry.memory import device_name


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
        ValueError: on every rank, what the schedule cannot place or keep, or a `--layer-costs` that does not serve.
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
    return plan_pipeline(model, request, context, state, wire_options(parallel), _costs_of_plan(config, state))


def micro_batch_counts(micro_batches: int, replicas: int) -> tuple[int, ...]:
    """How many of a global batch's micro-batches a replica may have, the largest number first."""
    counts = {len(micro_batches_of(micro_batches, replicas, replica)) for replica in (0, replicas - 1)}
    return tuple(sorted(counts, reverse=True))


def _costs_of_plan(config: PretrainConfig, state: ParallelState) -> PipelineCosts | None:
    """Those that `--layer-costs` names, read by the first rank; None where it names none."""
    if config.parallel.layer_costs is None:
        return None
    here, device = int(os.environ.get("LOCAL_WORLD_SIZE", state.world.size)), device_name(state.device)
    return broadcast_object(state.world, lambda: planned_costs(config, state.grid, here, device))


def planned_costs(config: PretrainConfig, grid: Grid, ranks_of_node: int, machine: str) -> PipelineCosts:
    """The costs of `--layer-costs` on a grid, as the planner has them: the same order of actions follows from them.

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
