"""The largest micro-batch that fits in memory, for --micro-batch-size auto."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from megasnn.checkpoint.folder import ChosenCheckpoint
from megasnn.common.checks import error_context
from megasnn.common.memory import available_memory_mb, resident_memory_mb
from megasnn.config import ConfigError, PretrainConfig, validate
from megasnn.config.training import Length
from megasnn.config.validate import micro_batch_candidates, with_micro_batch
from megasnn.engine import Engine
from megasnn.engine.build import ENDLESS
from megasnn.parallel.agreement import gather
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.profile_layers import count_memory
from megasnn.training.memory import forecast_of_rank

SHARE = 0.8
"""Usable share, since predictions err by a tenth and other programs need memory."""


@error_context("while finding the micro-batch size")
def find_micro_batch(
    config: PretrainConfig, state: ParallelState, checkpoint: ChosenCheckpoint | None
) -> tuple[PretrainConfig, str]:
    """Configuration with a number in place of auto, and a notice. Collective; the same on every rank.

    Args:
        checkpoint: to continue from; its size is kept.
    Raises:
        ValueError: even the smallest size does not fit in memory.
        ConfigError: the checkpoint's size does not fit the other flags.
    """
    if not config.training.finds_micro_batch:
        return config, ""
    # Norms see a micro-batch: another size would train another function.
    kept = None if config.checkpoint.finetune else _size_in(checkpoint)
    if kept is not None:
        found, why = kept, "that of the checkpoint"
    else:
        sizes = micro_batch_candidates(config, state.world.size)
        # A rank without memory is killed on a CPU, and leaves other ranks waiting: only a single GPU tries.
        tries = state.world.size == 1 and state.device.type == "cuda"
        if tries:
            found, why = largest_tried(config, sizes, try_step)
        else:
            found, why = _largest_in_free_memory(config, state, sizes)
    resolved = with_micro_batch(config, found)
    try:
        validate(resolved, state.world.size)
    except ConfigError as error:
        # Candidates fit: this is the checkpoint's size, which the command line does not show.
        problems = [f"--micro-batch-size auto keeps the checkpoint's {found}: {problem}" for problem in error.problems]
        raise ConfigError(problems) from None
    return resolved, f"--micro-batch-size auto: {found}, {why}"


def _size_in(checkpoint: ChosenCheckpoint | None) -> int | None:
    """None for weights from elsewhere."""
    beside: Any = None if checkpoint is None else checkpoint.metadata.extra
    match beside:
        case {"recipe": {"--micro-batch-size": int(size)}}:
            return size
    return None


def _engine_of(config: PretrainConfig, size: int) -> Engine:
    # The length changes only learning rates, which nothing here uses.
    return Engine(with_micro_batch(config, size), length=Length(ENDLESS))


def _largest_in_free_memory(config: PretrainConfig, state: ParallelState, sizes: Sequence[int]) -> tuple[int, str]:
    """Collective."""
    ranks_of_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if state.device.type == "cpu" else 1
    # Weights, gradients and optimizer state are the same for all sizes.
    with _engine_of(config, sizes[0]) as engine:
        own = resident_memory_mb(state.device) + available_memory_mb(state.device) / ranks_of_host
        limit = SHARE * min(gather(state.world.handle, own))
        size, need = largest_predicted(config, engine, sizes, limit)
    return size, f"the largest part of {sizes[-1]} that fits: {need:.0f} MB a rank predicted, of {limit:.0f}"


def largest_predicted(config: PretrainConfig, engine: Engine, sizes: Sequence[int], limit: float) -> tuple[int, float]:
    """Largest of ascending sizes within `limit` MB, and the MB that the fullest rank needs for it. Collective.

    Raises:
        ValueError: even the smallest size does not fit.
    """
    for size in reversed(sizes):
        need = max(gather(engine.state.world.handle, predicted_mb(with_micro_batch(config, size), engine)))
        if need <= limit:
            return size, need
    raise ValueError(_too_large(sizes[0], f"needs {need:.0f} MB a rank, and {limit:.0f} MB are there"))


def predicted_mb(config: PretrainConfig, engine: Engine) -> float:
    """This rank's peak. Collective over tensor-parallel ranks."""
    distributed = engine.distributed
    samples = config.training.micro_batch_size
    costs = count_memory(distributed.description, samples, distributed.context, engine.state.device)
    count = -(-config.training.micro_batches * config.windows // engine.state.dp.size)
    plan = replace(engine.plan, micro_batches=count)
    return forecast_of_rank(config, engine, plan, costs).total


def largest_tried(
    config: PretrainConfig, sizes: Sequence[int], try_step: Callable[[PretrainConfig, int], None]
) -> tuple[int, str]:
    """Tries steps in ascending size until memory is exhausted."""
    largest = 0
    for size in sizes:
        try:
            try_step(config, size)
        except torch.OutOfMemoryError:
            break
        largest = size
    if not largest:
        raise ValueError(_too_large(sizes[0], "exhausts the memory"))
    return largest, f"the largest part of {sizes[-1]} whose step fits in the GPU's memory"


def try_step(config: PretrainConfig, size: int) -> None:
    """One step on random inputs, with gradients and optimizer state. Raises torch.OutOfMemoryError."""
    with _engine_of(config, size) as engine:
        task = engine.distributed.description.task
        samples = config.training.global_batch_size
        inputs = task.examples(samples, engine.distributed.context.numerics.dtype)
        targets = torch.zeros_like(task.target_spec.empty(samples, torch.float32), device="cpu")
        engine.train_step(inputs, targets)
    torch.cuda.empty_cache()


def _too_large(size: int, why: str) -> str:
    return (
        f"--micro-batch-size auto: a micro-batch of {size} {why}; use --recompute always, a larger "
        "--tensor-model-parallel-size or --pipeline-model-parallel-size, or a smaller model"
    )
