"""Checks of a layout: the grid of ranks, the model's cut, memory limits, and what replicas need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megasnn.batching import micro_batch_sizes
from megasnn.config.checks import refusal
from megasnn.config.pretrain import PretrainConfig
from megasnn.grid import Axis, Grid
from megasnn.schedule.partition import layout_to_bounds
from megasnn.schedule.passes import NEVER


def grid_problems(config: PretrainConfig, world_size: int) -> list[str]:
    """The world size, and whether there is work for every replica."""
    tensor = config.parallel.tensor_model_parallel_size
    pipeline = config.parallel.pipeline_model_parallel_size
    weight, context = config.parallel.weight_parallel_size, config.parallel.context_parallel_size
    if min(tensor, pipeline, weight, context) < 1:
        return []  # reported by ParallelConfig
    try:
        grid = Grid.fit(world_size, tensor, pipeline, weight, context)
    except ValueError as error:
        return [str(error)]
    training = config.training
    if min(training.micro_batch_size, training.global_batch_size) < 1:
        return []  # reported by TrainingConfig
    if training.micro_batches >= grid.replicas:
        return _sharing_problems(config, grid) + _context_problems(config)
    return [
        f"--global-batch-size {training.global_batch_size} with "
        f"--micro-batch-size {training.micro_batch_size} is {training.micro_batches} micro-batch(es), but there "
        f"are {grid.replicas} data parallel replicas ({_quotient(grid, 'context')}) and each needs at least one"
    ]


def _quotient(grid: Grid, finer: Axis) -> str:
    """What a number of ranks is the quotient of, with a finer axis where it has several ranks."""
    size = grid.size(finer)
    return f"world size {grid.world_size} / tensor {grid.tensor} / pipeline {grid.pipeline}" + (
        f" / {finer} {size}" if size > 1 else ""
    )


def _sharing_problems(config: PretrainConfig, grid: Grid) -> list[str]:
    """Replicas that gather weights together, with other numbers of micro-batches."""
    if grid.weight == 1 or config.training.evaluate_only:
        return []
    asked, count, wrong = f"--weight-parallel-size {grid.weight}", config.training.micro_batches, []
    if count % grid.replicas:
        wrong.append(
            f"{asked} with {count} micro-batches on {grid.replicas} data parallel replicas, which gather weights "
            "together and need equally many; change --global-batch-size or --micro-batch-size"
        )
    if config.data.last_batch == "keep":
        wrong.append(f"{asked} with --last-batch keep, where replicas may have unequally many micro-batches; use drop")
    return wrong


def _context_problems(config: PretrainConfig) -> list[str]:
    """Micro-batches that ranks cannot share."""
    training, ranks = config.training, config.parallel.context_parallel_size
    if ranks == 1:
        return []
    size, asked = training.micro_batch_size, f"--context-parallel-size {ranks}"
    if config.parallel.context_cut(size) == "rows":
        return []  # which layers have too few, building them finds
    if size < ranks:
        return [
            f"{asked} by samples with --micro-batch-size {size}: each rank needs a sample; raise --micro-batch-size to "
            f"{ranks} or more"
        ]
    last = micro_batch_sizes(training.global_batch_size, size)[-1]
    if last < ranks and not training.evaluate_only:
        return [
            f"{asked} by samples: the last micro-batch of --global-batch-size {training.global_batch_size} with "
            f"--micro-batch-size {size} has {last} sample(s), and each rank needs one; change either size"
        ]
    return []


def partition_problems(config: PretrainConfig, units_of: Callable[[], Sequence[str]]) -> list[str]:
    """Whether the model's layers can be laid out on the pipeline's chunks.

    Args:
        units_of: gives the unit of each layer.
    """
    parallel = config.parallel
    if parallel.layout is None and parallel.chunks == 1:
        return []
    units = units_of()
    if parallel.layout is not None:
        return refusal(layout_to_bounds, parallel.layout, units, parallel.chunks)
    if parallel.chunks > len(units):
        virtual = parallel.chunks_per_rank or 1
        return [
            f"--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size} x "
            f"--num-virtual-stages-per-pipeline-rank {virtual} are more chunks than "
            f"the model's {len(units)} layers"
        ]
    return []


def recompute_problems(config: PretrainConfig) -> list[str]:
    """Forwards that go on from what the one before them left cannot be computed again."""
    parallel, steps = config.parallel, config.training.bptt_steps
    if steps is None or parallel.recompute == NEVER and parallel.memory_budget is None:
        return []
    asked = f"--recompute {parallel.recompute}"
    if parallel.memory_budget is not None:
        asked = f"--memory-budget {parallel.memory_budget:g}"
    return [
        f"{asked} with --bptt-steps {steps}: a window's forward goes on from potentials that are gone when it would be "
        "computed again; leave it out, windows keep little"
    ]


def cost_problems(config: PretrainConfig) -> list[str]:
    """Costs of layers that are shown other frames than those of a run."""
    path, steps = config.parallel.layer_costs, config.training.bptt_steps
    if path is None or steps is None:
        return []
    return [
        f"--layer-costs {path} with --bptt-steps {steps}: costs are of all time steps of a sample, and a run computes "
        "windows of them; leave --layer-costs out"
    ]


def replica_problems(config: PretrainConfig, world_size: int) -> list[str]:
    """Whether there are ranks to compare, and enough of them for a majority."""
    parallel = config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    grid = Grid.fit(world_size, tensor, pipeline, parallel.weight_parallel_size, parallel.context_parallel_size)
    sizes, alike = _quotient(grid, "weight"), grid.data * grid.context
    if parallel.replica_mismatch == "majority" and alike < 3:
        return [
            f"--replica-mismatch majority needs three ranks or more that hold the same, and there are {alike} "
            f"({sizes}); use stop"
        ]
    if parallel.check_replicas_interval and grid.replicas * grid.context * grid.tensor == 1:
        return [
            f"--check-replicas-interval {parallel.check_replicas_interval} compares ranks that hold the same, and "
            f"there are none ({sizes}); leave the flag out"
        ]
    return []
