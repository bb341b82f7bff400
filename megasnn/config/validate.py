"""Checks between the parts of a configuration, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from megasnn.common.grid import Grid, micro_batch_sizes
from megasnn.config.checks import ConfigError, flag, refusal
from megasnn.config.parallel import ParallelConfig
from megasnn.config.run import PretrainConfig
from megasnn.config.training import LENGTHS, LOSSES, PRECISIONS, TrainingConfig
from megasnn.config.values import build_part, to_dict
from megasnn.kernels import BACKENDS
from megasnn.schedule.partition import layout_to_bounds
from megasnn.schedule.passes import NEVER


def validate(config: PretrainConfig, world_size: int) -> None:
    """Raises ConfigError that lists every problem within and between the parts, each with value and flag."""
    build_part(type(config.model), to_dict(config.model), "model")  # an object may have been made in Python
    problems = config.model.problems(config.parallel.tensor_model_parallel_size)
    for part in fields(config):
        if part.name not in ("model", "parallel", "logging"):
            problems += getattr(config, part.name).problems()
    problems += layout_problems(config, world_size)
    training = config.training
    if not training.evaluate_only and all(getattr(training, name) is None for name in LENGTHS):
        problems.append(f"give {' or '.join(map(flag, LENGTHS))}; none was given")
    problems += [*_evaluation_problems(config), *_training_problems(config)]
    if problems:
        raise ConfigError(problems)


def layout_problems(config: PretrainConfig, world_size: int) -> list[str]:
    """Problems of a layout on so many ranks, of a configuration that one rank can have."""
    parallel, training = config.parallel, config.training
    problems = parallel.problems()
    problems += [*_grid_problems(config, world_size), *_window_problems(config), *_task_problems(config)]
    if PRECISIONS[training.precision].rounds and parallel.device == "cpu":
        problems.append(f"--precision {training.precision} is for GPUs, not --device cpu; use --precision fp32")
    if training.cuda_graphs == "on" and (why := _no_graphs(config)) is not None:
        problems.append(f"--cuda-graphs on: {why}; use off")
    return problems


def cut_problems(parallel: ParallelConfig, layer_groups: Sequence[str]) -> list[str]:
    """Problem of an explicit cut into stages, --pipeline-model-parallel-layout; empty without one.

    Args:
        layer_groups: the layer group of each layer, from input to output.
    """
    if parallel.layout is None:
        return []
    return refusal(layout_to_bounds, parallel.layout, layer_groups, parallel.chunks)


def _no_graphs(config: PretrainConfig) -> str | None:
    """Reason why no layer of a run can be a CUDA graph; None where they may."""
    parallel = config.parallel
    if parallel.device == "cpu":
        return "there are none with --device cpu"
    for size in ("tensor_model_parallel_size", "context_parallel_size"):
        if getattr(parallel, size) > 1:
            return f"with {flag(size)} above 1 ranks exchange inside of layers"
    if config.windows > 1:
        return "with --bptt-steps neurons go on from the window before"
    if parallel.weight_parallel_size > 1:
        return "with --weight-parallel-size above 1 weights do not stay in memory"
    if parallel.recompute != NEVER or parallel.memory_budget is not None:
        return "with --recompute or --memory-budget what forward keeps is computed again"
    return None


# --- the layout


def _grid_problems(config: PretrainConfig, world_size: int) -> Iterator[str]:
    """Sizes that do not divide the ranks; replicas without work or with unequal work; ranks without a sample."""
    parallel, training = config.parallel, config.training
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    weight, context = parallel.weight_parallel_size, parallel.context_parallel_size
    try:
        grid = Grid.fit(world_size, tp=tensor, pp=pipeline, dp_shard=weight, cp=context)
    except ValueError as error:
        yield str(error)
        return
    replicas = grid.replicas
    count, size = training.micro_batches, training.micro_batch_size
    batch = f"--global-batch-size {training.global_batch_size} with --micro-batch-size {size}"
    if count < replicas:
        most = training.global_batch_size // replicas
        smaller = f"--micro-batch-size {most}, over which batch norm then is"
        smaller = smaller if most else "a larger --global-batch-size"
        yield (
            f"{batch} is {count} micro-batch(es), but there are {replicas} data parallel replicas (world size "
            f"{world_size} / tensor {tensor} / pipeline {pipeline} / context {context}) and each needs at least one; "
            f"use {smaller}; or a larger --context-parallel-size or --tensor-model-parallel-size, which keep the "
            "function"
        )
        return
    if weight > 1 and not training.evaluate_only:
        asked = f"--weight-parallel-size {weight} needs equally many micro-batches on all data parallel replicas"
        if count % replicas:
            yield f"{asked}, and {count} are on {replicas}; change --global-batch-size or --micro-batch-size"
    # By rows, layers with too few of them are found where they are built.
    if context > 1 and parallel.context_cut(size) == "samples":
        asked = f"--context-parallel-size {context} by samples"
        if size < context:
            yield f"{asked} with --micro-batch-size {size}: each rank needs a sample; raise it to {context} or more"
        elif size <= training.global_batch_size and not training.evaluate_only:
            last = micro_batch_sizes(training.global_batch_size, size)[-1]
            if last < context:
                yield f"{asked}: {batch} ends with {last} sample(s), and each rank needs one; change either size"


def _window_problems(config: PretrainConfig) -> Iterator[str]:
    """Windows of time steps go on from the one before, which recomputation does not know."""
    parallel, steps = config.parallel, config.training.bptt_steps
    again = f"--recompute {parallel.recompute}" if parallel.recompute != NEVER else ""
    again = again if parallel.memory_budget is None else f"--memory-budget {parallel.memory_budget}"
    if steps is not None and again:
        yield (
            f"{again} with --bptt-steps {steps}: a window goes on from potentials that are not there any more; leave "
            "it out, windows keep little"
        )
    if steps is not None and config.model.time_steps % steps:
        yield f"--time-steps {config.model.time_steps} does not divide by --bptt-steps {steps}"


def _task_problems(config: PretrainConfig) -> Iterator[str]:
    """Flags that know images and their classes alone, beside a model with a task of its own."""
    data, training, parallel, usual = config.data, config.training, config.parallel, TrainingConfig()
    if {"target", "metrics"} & {*config.model.own_task()} and config.checkpoint.keep_best:
        yield f"--keep-best goes by the accuracy of classes, which {config.model.name} does not have; leave it out"
    own = [name for name in config.model.own_task() if name in ("inputs", "target", "loss")]
    if not own:
        return
    why = f"{config.model.name} has its own {' and '.join(own)}"
    if parallel.context_parallel_size > 1 and parallel.context_cut(training.micro_batch_size) == "rows":
        yield f"--context-parallel-size by rows cuts images and logits, and {why}; use --context-parallel-cut samples"
    if config.windows > 1:
        yield f"--bptt-steps {training.bptt_steps} cuts images and logits in time, and {why}; leave it out"
    if asked := data.changed("mixup_alpha", "cutmix_alpha"):
        yield f"{' and '.join(asked)} mixes images and their classes, and {why}; leave it out"
    asked = [flag(name) for name in ("loss", "label_smoothing") if getattr(training, name) != getattr(usual, name)]
    if "loss" in own and asked:
        yield f"{' and '.join(asked)} is for classes by --loss, and {why}; leave it out"


# --- the run


def _evaluation_problems(config: PretrainConfig) -> Iterator[str]:
    """Evaluations without anything to evaluate, or to evaluate on."""
    data, logging, options = config.data, config.logging, config.checkpoint
    asked: dict[str, object] = {"--eval-interval": logging.eval_interval, "--eval-iters": logging.eval_iters}
    if config.training.evaluate_only:
        if options.load is None:
            yield "--evaluate-only needs --load"
        asked = {"--evaluate-only": "", **asked}
    elif options.keep_best and logging.eval_interval is None:
        yield "--keep-best needs --eval-interval: the best of what is evaluated on the way"
    if not (options.ema or config.training.evaluate_only or options.finetune):
        yield "--no-ema is for --evaluate-only and --finetune: a run that goes on takes the weights and their average"
    if data.data_path != "sample" and data.valid_data_path is None:
        for name, value in asked.items():
            if value or value == "":
                yield f"{name} {value}".strip() + " needs --valid-data-path"


def _training_problems(config: PretrainConfig) -> Iterator[str]:
    """Mixed samples with a loss that takes classes only; neurons that a backend lacks."""
    data, training, neuron = config.data, config.training, config.neuron
    asked = " and ".join(data.changed("mixup_alpha", "cutmix_alpha"))
    if data.mixes and not LOSSES[training.loss].mixes:
        able = " or ".join(name for name, loss in LOSSES.items() if loss.mixes)
        yield f"{asked} makes labels probabilities, and --loss {training.loss} takes classes; use {able}"
    if neuron.neuron_backend not in BACKENDS.also:
        lacks = BACKENDS[neuron.neuron_backend].lacks(neuron.neuron, neuron.surrogate)
        if lacks is not None:
            yield f"--neuron-backend {neuron.neuron_backend}: {lacks}; use auto or torch"
