"""Checks of a layout: the grid of ranks, the model's cut, recomputation, and what replicas need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megasnn.batching import micro_batch_sizes
from megasnn.config.checks import refusal
from megasnn.config.pretrain import PretrainConfig
from megasnn.grid import Grid
from megasnn.schedule.partition import layout_to_bounds
from megasnn.schedule.passes import NEVER


def grid_of(config: PretrainConfig, world_size: int) -> Grid:
    """The grid of ranks. Raises ValueError where the sizes do not divide the number of ranks."""
    parallel = config.parallel
    return Grid.fit(
        world_size,
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.weight_parallel_size,
        parallel.context_parallel_size,
    )


def grid_problems(config: PretrainConfig, world_size: int) -> list[str]:
    """A number of ranks that does not fit the sizes, and replicas without work."""
    if wrong := refusal(grid_of, config, world_size):
        return wrong
    grid, training = grid_of(config, world_size), config.training
    if training.micro_batches >= grid.replicas:
        return _sharing_problems(config, grid) + _context_problems(config)
    return [
        f"--global-batch-size {training.global_batch_size} with --micro-batch-size {training.micro_batch_size} is "
        f"{training.micro_batches} micro-batch(es), but there are {grid.replicas} data parallel replicas "
        f"({_sizes(grid)}) and each needs at least one"
    ]


def _sizes(grid: Grid) -> str:
    context = f" / context {grid.context}" if grid.context > 1 else ""
    return f"world size {grid.world_size} / tensor {grid.tensor} / pipeline {grid.pipeline}{context}"


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
    """Micro-batches with fewer samples than ranks. Layers with too few rows are found where they are built."""
    training, ranks = config.training, config.parallel.context_parallel_size
    size, asked = training.micro_batch_size, f"--context-parallel-size {ranks} by samples"
    if ranks == 1 or config.parallel.context_cut(size) == "rows":
        return []
    if size < ranks:
        return [f"{asked} with --micro-batch-size {size}: each rank needs a sample; raise it to {ranks} or more"]
    last = micro_batch_sizes(training.global_batch_size, size)[-1]
    if last < ranks and not training.evaluate_only:
        return [
            f"{asked}: the last micro-batch of --global-batch-size {training.global_batch_size} with "
            f"--micro-batch-size {size} has {last} sample(s), and each rank needs one; change either size"
        ]
    return []


def partition_problems(config: PretrainConfig, units_of: Callable[[], Sequence[str]]) -> list[str]:
    """A model whose layers cannot be laid out on the pipeline's chunks.

    Args:
        units_of: gives the unit of each layer.
    """
    parallel = config.parallel
    if parallel.layout is None and parallel.chunks == 1:
        return []
    units = units_of()
    if parallel.layout is not None:
        return refusal(layout_to_bounds, parallel.layout, units, parallel.chunks)
    if parallel.chunks <= len(units):
        return []
    return [
        f"--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size} x "
        f"--num-virtual-stages-per-pipeline-rank {parallel.chunks_per_rank or 1} are more chunks than the model's "
        f"{len(units)} layers"
    ]


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
