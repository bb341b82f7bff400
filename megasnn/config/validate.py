"""Checks between the parts of a configuration, before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

from megasnn.batching import micro_batch_sizes
from megasnn.config.checks import ConfigError, flag, refusal
from megasnn.config.pretrain import PretrainConfig
from megasnn.config.training import LENGTHS
from megasnn.config.values import build_part, to_dict
from megasnn.grid import Grid
from megasnn.kernels import BACKENDS
from megasnn.losses import LOSSES
from megasnn.optimizers import OPTIMIZERS
from megasnn.precisions import PRECISIONS
from megasnn.schedule.named import looks_at_costs
from megasnn.schedule.partition import layout_to_bounds
from megasnn.schedule.passes import NEVER


def validate(config: PretrainConfig, world_size: int) -> None:
    """Raises ConfigError that lists every problem within and between the parts, each with value and flag."""
    build_part(type(config.model), to_dict(config.model), "model")  # an object may have been made in Python
    problems = config.model.problems(config.parallel.tensor_model_parallel_size)
    for part in fields(config):
        if part.name not in ("model", "parallel"):
            problems += getattr(config, part.name).problems()
    problems += layout_problems(config, world_size, config.model.units if not problems else None)
    problems += [*_length_problems(config), *_evaluation_problems(config), *_training_problems(config)]
    if problems:
        raise ConfigError(problems)


def layout_problems(config: PretrainConfig, world_size: int, units: Callable[[], Sequence[str]] | None) -> list[str]:
    """Problems of a layout on so many ranks, of a configuration that one rank can have.

    Args:
        units: gives the unit of each layer; None where the model's dimensions are wrong.
    """
    problems = config.parallel.problems()
    partition = _partition_problems(config, units) if units is not None and not problems else []
    problems += [*_grid_problems(config, world_size), *partition, *_window_problems(config)]
    return problems + [*_arithmetic_problems(config), *_optimizer_problems(config, world_size)]


def no_graphs(config: PretrainConfig) -> str | None:
    """Reason why none of the layers of a run can be CUDA graphs; None where some may."""
    parallel = config.parallel
    if parallel.device == "cpu":
        return "there are none with --device cpu"
    for size in ("tensor_model_parallel_size", "context_parallel_size"):
        if getattr(parallel, size) > 1:
            return f"with {flag(size)} above 1 ranks exchange inside of layers"
    if config.training.windows(config.model.time_steps) > 1:
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
        yield (
            f"{batch} is {count} micro-batch(es), but there are {replicas} data parallel replicas (world size "
            f"{world_size} / tensor {tensor} / pipeline {pipeline} / context {context}) and each needs at least one"
        )
        return
    if weight > 1 and not training.evaluate_only:
        asked = f"--weight-parallel-size {weight} needs equally many micro-batches on all data parallel replicas"
        if count % replicas:
            yield f"{asked}, and {count} are on {replicas}; change --global-batch-size or --micro-batch-size"
        if config.data.last_batch == "keep":
            yield f"{asked}: not --last-batch keep, but drop"
    # By rows, layers with too few of them are found where they are built.
    if context > 1 and parallel.context_cut(size) == "samples":
        asked = f"--context-parallel-size {context} by samples"
        if size < context:
            yield f"{asked} with --micro-batch-size {size}: each rank needs a sample; raise it to {context} or more"
        elif size <= training.global_batch_size and not training.evaluate_only:
            last = micro_batch_sizes(training.global_batch_size, size)[-1]
            if last < context:
                yield f"{asked}: {batch} ends with {last} sample(s), and each rank needs one; change either size"


def _partition_problems(config: PretrainConfig, units_of: Callable[[], Sequence[str]]) -> list[str]:
    """A model whose layers cannot be laid out on the pipeline's chunks."""
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


def _window_problems(config: PretrainConfig) -> Iterator[str]:
    """Windows of time steps go on from the one before, which recomputation does not know."""
    parallel, steps = config.parallel, config.training.bptt_steps
    given: dict[str, object] = {"recompute": parallel.recompute if parallel.recompute != NEVER else None}
    given["memory_budget"] = parallel.memory_budget
    for name, value in given.items():
        if steps is not None and value is not None:
            yield (
                f"{flag(name)} {value} with --bptt-steps {steps}: a window goes on from potentials that are not there "
                "any more; leave it out, windows keep little"
            )
    if steps is not None and config.model.time_steps % steps:
        yield f"--time-steps {config.model.time_steps} does not divide by --bptt-steps {steps}"


def _arithmetic_problems(config: PretrainConfig) -> Iterator[str]:
    """Arithmetic that the device does not have, and an order that depends on measured times."""
    parallel, training = config.parallel, config.training
    if PRECISIONS[training.precision].rounds and parallel.device == "cpu":
        yield f"--precision {training.precision} is for GPUs, not --device cpu; use --precision fp32"
    schedule, scatters = parallel.pipeline_schedule, parallel.weight_gradients == "scattered"
    if training.deterministic and scatters and parallel.pipeline_model_parallel_size > 1 and looks_at_costs(schedule):
        yield (
            f"--deterministic with --weight-gradients scattered and --pipeline-schedule {schedule}, whose order "
            "follows from measured times; use a schedule with a fixed order (1f1b), or --weight-gradients once"
        )
    if training.cuda_graphs == "on" and (why := no_graphs(config)) is not None:
        yield f"--cuda-graphs on: {why}; use auto or off"


def _optimizer_problems(config: PretrainConfig, world_size: int) -> Iterator[str]:
    """An optimizer that needs whole tensors where a rank has parts of them."""
    parallel, name = config.parallel, config.optimizer.optimizer
    able = ", ".join(other for other, recipe in OPTIMIZERS.items() if recipe.elementwise)
    for size in ("tensor_model_parallel_size", "weight_parallel_size", "use_distributed_optimizer"):
        value = getattr(parallel, size)
        if not OPTIMIZERS[name].elementwise and (value > 1 or (value is True and world_size > 1)):
            given = flag(size) if value is True else f"{flag(size)} {value}"
            yield (
                f"--optimizer {name} needs whole tensors, and with {given} a rank updates parts of them; leave it out, "
                f"or take another optimizer ({able})"
            )


# --- the run


def _length_problems(config: PretrainConfig) -> Iterator[str]:
    """A training without a length; warm-up, cool-down and profile against the length."""
    training, rates, epochs = config.training, config.optimizer, config.training.train_epochs
    if training.evaluate_only:
        return
    if training.train_iters is None and epochs is None:
        yield f"give {' or '.join(map(flag, LENGTHS))}; none was given"
    if training.train_iters is not None and rates.lr_warmup_iters > training.train_iters:
        yield f"--lr-warmup-iters {rates.lr_warmup_iters} is more than --train-iters {training.train_iters}"
    if epochs is not None and rates.lr_warmup_epochs + rates.lr_cooldown_epochs > epochs:
        yield (
            f"--lr-warmup-epochs {rates.lr_warmup_epochs} and --lr-cooldown-epochs {rates.lr_cooldown_epochs} are "
            f"together more than --train-epochs {epochs}"
        )


def _evaluation_problems(config: PretrainConfig) -> Iterator[str]:
    """Evaluations without anything to evaluate, or to evaluate on; profiles without a place."""
    data, logging, options = config.data, config.logging, config.checkpoint
    asked: dict[str, object] = {"--eval-interval": logging.eval_interval, "--eval-iters": logging.eval_iters}
    if config.training.evaluate_only:
        if options.load is None:
            yield "--evaluate-only needs --load"
        given = {"--save": options.save, "--profile-steps": logging.profile_steps}
        given["--eval-iters"] = "0" if logging.eval_iters == 0 else None
        yield from (
            f"--evaluate-only has no use for {name} {value}: leave it out" for name, value in given.items() if value
        )
        asked = {"--evaluate-only": "", **asked}
    elif options.keep_best and logging.eval_interval is None:
        yield "--keep-best needs --eval-interval: the best of what is evaluated on the way"
    if data.data_path != "sample" and data.valid_data_path is None:
        for name, value in asked.items():
            if value or value == "":
                yield f"{name} {value}".strip() + " needs --valid-data-path"
    if logging.profile_steps is not None and not logging.problems():
        profile, last = f"--profile-steps {logging.profile_steps}", config.training.train_iters
        if options.save is None and logging.tensorboard_dir is None:
            yield f"{profile} has no folder to write to: give --tensorboard-dir or --save"
        if last is not None and logging.profiled_steps[0] > last:
            yield f"{profile} is after the last of {last} iterations"


def _training_problems(config: PretrainConfig) -> Iterator[str]:
    """Mixed samples without a partner, or with a loss that takes classes only; neurons that a backend lacks."""
    data, training, neuron = config.data, config.training, config.neuron
    asked = " and ".join(data.changed("mixup_alpha", "cutmix_alpha"))
    if data.mixes and training.micro_batch_size == 1:
        yield f"{asked} mixes samples of one micro-batch: --micro-batch-size 1 must be 2 or more"
    if data.mixes and not LOSSES[training.loss].mixes:
        able = " or ".join(name for name, loss in LOSSES.items() if loss.mixes)
        yield f"{asked} makes labels probabilities, and --loss {training.loss} takes classes; use {able}"
    if neuron.neuron_backend not in BACKENDS.also:
        lacks = BACKENDS[neuron.neuron_backend].lacks(neuron.neuron, neuron.surrogate)
        if lacks is not None:
            yield f"--neuron-backend {neuron.neuron_backend}: {lacks}; use auto or torch"
