"""Checks of what is between the parts of a configuration, before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

from megasnn.config.checks import ConfigError, flag
from megasnn.config.pretrain import PretrainConfig
from megasnn.config.training import LENGTHS
from megasnn.config.validate_layout import (
    grid_problems,
    partition_problems,
    recompute_problems,
)
from megasnn.config.values import build_part, to_dict
from megasnn.kernels import BACKENDS
from megasnn.losses import LOSSES
from megasnn.optimizers import OPTIMIZERS
from megasnn.precisions import PRECISIONS
from megasnn.schedule.named import looks_at_costs
from megasnn.schedule.passes import NEVER


def validate(config: PretrainConfig, world_size: int) -> None:
    """Raises ConfigError that lists every problem within and between the parts, each with value and flag."""
    build_part(type(config.model), to_dict(config.model), "model")  # an object may have been made in Python
    tensor_parallel = config.parallel.tensor_model_parallel_size
    problems = config.model.problems(tensor_parallel)
    for part in fields(config):
        if part.name not in ("model", "parallel"):
            problems += getattr(config, part.name).problems()
    problems += layout_problems(config, world_size, config.model.units if not problems else None)
    problems += _length_problems(config) + _evaluation_problems(config) + _mixing_problems(config)
    problems += _neuron_problems(config) + _profile_problems(config)
    if problems:
        raise ConfigError(problems)


def layout_problems(config: PretrainConfig, world_size: int, units: Callable[[], Sequence[str]] | None) -> list[str]:
    """Problems of a layout on so many ranks, of a configuration that one rank can have.

    Args:
        units: gives the unit of each layer; None where the model's dimensions are wrong.
    """
    problems = config.parallel.problems()
    sound = not problems
    problems += grid_problems(config, world_size)
    if sound and units is not None:
        problems += partition_problems(config, units)
    problems += recompute_problems(config)
    return problems + _optimizer_problems(config, world_size) + _arithmetic_problems(config) + _graph_problems(config)


def no_graphs(config: PretrainConfig) -> str | None:
    """Why none of the layers of a run can be CUDA graphs; None where some may."""
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


def _length_problems(config: PretrainConfig) -> list[str]:
    """A training without a length; warm-up and cool-down against the length."""
    training, rates = config.training, config.optimizer
    if training.evaluate_only or config.logging.model_summary:
        return []
    if training.train_iters is None and training.train_epochs is None:
        return [f"give {' or '.join(map(flag, LENGTHS))}; none was given"]
    if training.train_iters is not None and rates.lr_warmup_iters > training.train_iters:
        return [f"--lr-warmup-iters {rates.lr_warmup_iters} is more than --train-iters {training.train_iters}"]
    epochs = training.train_epochs
    if epochs is not None and rates.lr_warmup_epochs + rates.lr_cooldown_epochs > epochs:
        return [
            f"--lr-warmup-epochs {rates.lr_warmup_epochs} and --lr-cooldown-epochs {rates.lr_cooldown_epochs} are "
            f"together more than --train-epochs {epochs}"
        ]
    return []


def _evaluation_problems(config: PretrainConfig) -> list[str]:
    """Evaluation that was asked for, without anything to evaluate on; one alone, without anything to evaluate."""
    data, logging, options = config.data, config.logging, config.checkpoint
    wrong = []
    if config.training.evaluate_only:
        if options.load is None:
            wrong.append("--evaluate-only needs --load")
        if options.save:
            wrong.append(f"--evaluate-only saves nothing: leave --save {options.save} out")
        if logging.eval_iters == 0:
            wrong.append("--evaluate-only has no meaning with --eval-iters 0")
        if logging.profile_steps is not None:
            wrong.append(f"--evaluate-only has no meaning with --profile-steps {logging.profile_steps}")
    elif options.keep_best and logging.eval_interval is None:
        wrong.append("--keep-best needs --eval-interval: the best of what is evaluated on the way")
    if data.data_path == "sample" or data.valid_data_path is not None:
        return wrong
    asked = {"--eval-interval": logging.eval_interval, "--eval-iters": logging.eval_iters}
    wrong += [f"{name} {value} needs --valid-data-path" for name, value in asked.items() if value]
    return wrong + ["--evaluate-only needs --valid-data-path"] * config.training.evaluate_only


def _mixing_problems(config: PretrainConfig) -> list[str]:
    """Mixed samples without a partner, or with a loss that takes classes only."""
    data, training = config.data, config.training
    if not data.mixes:
        return []
    asked = " and ".join(data.changed("mixup_alpha", "cutmix_alpha"))
    wrong = []
    if training.micro_batch_size == 1:
        wrong.append(f"{asked} mixes samples of one micro-batch: --micro-batch-size 1 must be 2 or more")
    if not LOSSES[training.loss].mixes:
        able = " or ".join(name for name, loss in LOSSES.items() if loss.mixes)
        wrong.append(f"{asked} makes labels probabilities, and --loss {training.loss} takes classes; use {able}")
    return wrong


def _neuron_problems(config: PretrainConfig) -> list[str]:
    """Time steps that are no whole number of windows, and a backend that cannot compute the neuron."""
    neuron, steps, wrong = config.neuron, config.training.bptt_steps, []
    if steps is not None and config.model.time_steps % steps:
        wrong.append(f"--time-steps {config.model.time_steps} does not divide by --bptt-steps {steps}")
    if neuron.neuron_backend in BACKENDS.also:
        return wrong
    lacks = BACKENDS[neuron.neuron_backend].missing(neuron.neuron, neuron.surrogate)
    if lacks is not None:
        wrong.append(
            f"--neuron-backend {neuron.neuron_backend} has the {lacks.what}s {' and '.join(lacks.known)}, not "
            f"--{lacks.what} {lacks.name}; use auto or torch"
        )
    return wrong


def _profile_problems(config: PretrainConfig) -> list[str]:
    """`--profile-pipeline` without pipeline stages, `--profile-steps` behind the end or without a folder."""
    options, last, wrong = config.logging, config.training.train_iters, []
    if options.profile_pipeline and config.parallel.pipeline_model_parallel_size == 1:
        wrong.append("--profile-pipeline needs --pipeline-model-parallel-size 2 or more")
    if options.profile_steps is None or options.problems():
        return wrong
    asked = f"--profile-steps {options.profile_steps}"
    if config.checkpoint.save is None and options.tensorboard_dir is None:
        wrong.append(f"{asked} has no folder to write to: give --tensorboard-dir or --save")
    if last is not None and options.profiled_steps[0] > last:
        wrong.append(f"{asked} is after the last of {last} iterations")
    return wrong


def _optimizer_problems(config: PretrainConfig, world_size: int) -> list[str]:
    """An optimizer that needs whole tensors where a rank has parts of them."""
    parallel, name = config.parallel, config.optimizer.optimizer
    if OPTIMIZERS[name].elementwise:
        return []
    sizes = [
        f"{flag(size)} {getattr(parallel, size)}"
        for size in ("tensor_model_parallel_size", "weight_parallel_size")
        if getattr(parallel, size) > 1
    ]
    if parallel.use_distributed_optimizer and world_size > 1:
        sizes.append(flag("use_distributed_optimizer"))
    return [
        f"--optimizer {name} needs whole tensors, and with {size} a rank updates parts of them; leave it out, or "
        f"take another optimizer ({', '.join(other for other, recipe in OPTIMIZERS.items() if recipe.elementwise)})"
        for size in sizes
    ]


def _arithmetic_problems(config: PretrainConfig) -> list[str]:
    """Arithmetic that the device does not have, and an order that depends on what was measured."""
    parallel, training = config.parallel, config.training
    wrong = []
    if PRECISIONS[training.precision].rounds and parallel.device == "cpu":
        wrong.append(f"--precision {training.precision} is for GPUs, not --device cpu; use --precision fp32")
    schedule, scatters = parallel.pipeline_schedule, parallel.weight_gradients == "scattered"
    if training.deterministic and scatters and parallel.pipeline_model_parallel_size > 1 and looks_at_costs(schedule):
        wrong.append(
            f"--deterministic with --weight-gradients scattered and --pipeline-schedule {schedule}: which gradients "
            "are sent together depends on the order, which follows from measured times; use a schedule with a fixed "
            "order (1f1b), or --weight-gradients once"
        )
    return wrong


def _graph_problems(config: PretrainConfig) -> list[str]:
    """`--cuda-graphs on` where no layer of a run can be a graph."""
    why = no_graphs(config) if config.training.cuda_graphs == "on" else None
    return [] if why is None else [f"--cuda-graphs on: {why}; use auto or off"]
