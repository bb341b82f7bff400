"""Checks between a configuration's parts, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace

from megasnn.common.files import quantity
from megasnn.common.grid import Grid, micro_batch_sizes
from megasnn.config.checks import ConfigError, as_flag, flag, refusal
from megasnn.config.data import SAMPLE
from megasnn.config.parallel import ParallelConfig
from megasnn.config.run import PretrainConfig
from megasnn.config.training import LENGTHS, LOSSES, PRECISIONS, TrainingConfig
from megasnn.config.values import build_part
from megasnn.kernels import BACKENDS
from megasnn.schedule.partition import layout_to_bounds
from megasnn.schedule.passes import NEVER


def micro_batch_candidates(config: PretrainConfig, world_size: int) -> list[int]:
    """Sizes for --micro-batch-size auto, ascending: equal micro-batches, at least one for each pipeline stage.

    Raises:
        ConfigError: no size gives every replica the same number of equal micro-batches.
    """
    training = config.training
    parallel = config.parallel
    grid = parallel.grid.over_ranks(world_size)
    share, rest = divmod(training.global_batch_size, grid.replicas)
    sizes = []
    if not rest:
        sizes = [size for size in range(1, share + 1) if share % size == 0 and share // size >= grid.pp]
    if not sizes:
        raise ConfigError(
            [
                f"--micro-batch-size auto: --global-batch-size {training.global_batch_size} on {grid.replicas} data "
                f"parallel replicas and {grid.pp} pipeline stages gives them no equal micro-batches; use a multiple "
                f"of {grid.replicas * grid.pp}"
            ]
        )
    return sizes


def with_micro_batch(config: PretrainConfig, size: int) -> PretrainConfig:
    return replace(config, training=replace(config.training, micro_batch_size=size))


def validate(config: PretrainConfig, world_size: int) -> None:
    """Raises ConfigError with all problems within and between the parts, each with value and flag."""
    if config.training.finds_micro_batch:
        problems = list(_auto_problems(config)) or refusal(micro_batch_candidates, config, world_size)
        if problems:
            raise ConfigError(problems)
        # Larger sizes have no other problems: the candidates divide the batch evenly.
        config = with_micro_batch(config, micro_batch_candidates(config, world_size)[0])
    # An object made in Python was not checked yet.
    build_part(type(config.model), asdict(config.model), "model")
    problems = config.model.problems(config.parallel.tensor_model_parallel_size)
    for part in fields(config):
        # The layout checks `parallel` itself, and fields of `logging` do not depend on each other.
        if part.name not in ("model", "parallel", "logging"):
            problems += getattr(config, part.name).problems()
    problems += layout_problems(config, world_size)
    training = config.training
    if not training.evaluate_only and all(getattr(training, name) is None for name in LENGTHS):
        problems.append(f"give {' or '.join(map(flag, LENGTHS))}; none was given")
    problems += _schedule_problems(config)
    problems += _evaluation_problems(config)
    problems += _mixing_problems(config)
    problems += _neuron_problems(config)
    if problems:
        raise ConfigError(problems)


def _auto_problems(config: PretrainConfig) -> Iterator[str]:
    """Flags that --micro-batch-size auto cannot stand beside."""
    parallel = config.parallel
    if parallel.memory_budget is not None:
        yield f"--micro-batch-size auto and --memory-budget {parallel.memory_budget:g} both follow memory; give one"
    if parallel.context_parallel_size > 1:
        yield (
            f"--micro-batch-size auto with --context-parallel-size {parallel.context_parallel_size}: give a number; "
            "ranks share a micro-batch by its size"
        )


def layout_problems(config: PretrainConfig, world_size: int) -> list[str]:
    """Layout problems on `world_size` ranks. On one rank the configuration must be valid."""
    problems = config.parallel.problems()
    problems += _grid_problems(config, world_size)
    problems += _window_problems(config)
    problems += _task_problems(config)
    problems += _graph_problems(config)
    problems += device_problems(config, config.parallel.device)
    return problems


def device_problems(config: PretrainConfig, device: str) -> list[str]:
    """Flags for GPUs on another device."""
    if device != "cpu":
        return []
    problems = []
    precision = config.training.precision
    if PRECISIONS[precision].rounds:
        problems.append(f"--precision {precision} is for GPUs, not --device cpu; use --precision fp32")
    if config.training.cuda_graphs == "on":
        problems.append("--cuda-graphs on: it is for GPUs, not --device cpu; use off")
    return problems


def cut_problems(parallel: ParallelConfig, layer_groups: Sequence[str]) -> list[str]:
    """Why --pipeline-model-parallel-layout does not fit a model; empty without the flag.

    Args:
        layer_groups: by layer, from input to output.
    """
    if parallel.layout is None:
        return []
    return refusal(layout_to_bounds, parallel.layout, layer_groups, parallel.chunks)


def _graph_problems(config: PretrainConfig) -> Iterator[str]:
    if config.training.cuda_graphs != "on":
        return
    parallel = config.parallel
    reasons = []
    if config.windows > 1:
        reasons.append("with --bptt-steps neurons keep their potential from window to window")
    if parallel.weight_parallel_size > 1:
        reasons.append("with --weight-parallel-size above 1 weights do not stay in memory")
    if parallel.recompute != NEVER or parallel.memory_budget is not None:
        reasons.append("with --recompute or --memory-budget the saved activations are computed again")
    for reason in reasons:
        yield f"--cuda-graphs on: {reason}; use off"


def _grid_problems(config: PretrainConfig, world_size: int) -> Iterator[str]:
    """Sizes incompatible with the number of ranks, replicas with no or unequal work, ranks without a sample."""
    try:
        grid = config.parallel.grid.over_ranks(world_size)
    except ValueError as error:
        yield str(error)
        return
    count = config.training.micro_batches
    if count < grid.replicas:
        yield _replicas_without_work(config, grid)
        return
    # Replicas gather shared weights together, so they need the same number of micro-batches. An evaluation pads with
    # empty micro-batches; a training would change its mean.
    if grid.dp_shard > 1 and count % grid.replicas and not config.training.evaluate_only:
        yield (
            f"--weight-parallel-size {grid.dp_shard} needs equally many micro-batches on all data parallel replicas, "
            f"and {count} are on {grid.replicas}; change --global-batch-size or --micro-batch-size"
        )
    # By rows and tokens, too few of them are found when layers are built.
    if grid.cp > 1 and config.context_cut == "samples":
        yield from _ranks_without_samples(config)


def _batch_text(config: PretrainConfig) -> str:
    training = config.training
    return f"--global-batch-size {training.global_batch_size} with --micro-batch-size {training.micro_batch_size}"


def _replicas_without_work(config: PretrainConfig, grid: Grid) -> str:
    training = config.training
    largest = training.global_batch_size // grid.replicas
    smaller = "a larger --global-batch-size"
    if largest:
        smaller = f"--micro-batch-size {largest}, which batch norm then normalises over"
    sizes = f"world size {grid.world_size} / tensor {grid.tp} / pipeline {grid.pp} / context {grid.cp}"
    return (
        f"{_batch_text(config)} is {quantity(training.micro_batches, 'micro-batch')}; {grid.replicas} data parallel "
        f"replicas ({sizes}) need one each; use {smaller}; or a larger --context-parallel-size or "
        "--tensor-model-parallel-size, which change no result"
    )


def _ranks_without_samples(config: PretrainConfig) -> Iterator[str]:
    training = config.training
    size = training.micro_batch_size
    context = config.parallel.context_parallel_size
    asked = f"--context-parallel-size {context} by samples"
    if size < context:
        yield f"{asked} with --micro-batch-size {size}: each rank needs a sample; raise it to {context} or more"
    elif size <= training.global_batch_size and not training.evaluate_only:
        last = micro_batch_sizes(training.global_batch_size, size)[-1]
        if last < context:
            batch = _batch_text(config)
            yield f"{asked}: {batch} ends with {quantity(last, 'sample')}, and each rank needs one; change either size"


def _window_problems(config: PretrainConfig) -> Iterator[str]:
    parallel = config.parallel
    steps = config.training.bptt_steps
    if steps is None:
        return
    recomputes = ""
    if parallel.memory_budget is not None:
        recomputes = f"--memory-budget {parallel.memory_budget}"
    elif parallel.recompute != NEVER:
        recomputes = f"--recompute {parallel.recompute}"
    if recomputes:
        # A window starts from the potentials of the one before, which are overwritten by then.
        yield (
            f"{recomputes} with --bptt-steps {steps}: a window cannot be computed again without its first potentials; "
            "leave it out, windows need little memory"
        )
    if config.model.time_steps % steps:
        yield f"--time-steps {config.model.time_steps} does not divide by --bptt-steps {steps}"


def _task_problems(config: PretrainConfig) -> Iterator[str]:
    model = config.model
    training = config.training
    task = model.own_task()
    if {"target", "metrics"} & {*task} and config.checkpoint.keep_best:
        yield f"--keep-best compares class accuracy, which {model.name} does not have; leave it out"
    own = [name for name in task if name in ("inputs", "target", "loss")]
    cut = config.context_cut if config.parallel.context_parallel_size > 1 else "samples"
    if cut == "tokens" and not {"inputs", "target"} <= {*own}:
        # Arrays of the model's own are looked at when it is built.
        yield (
            f"--context-parallel-cut tokens cuts sequences of tokens, and {model.name} takes images or gives classes; "
            "use samples or rows"
        )
    if not own:
        return
    why = f"{model.name} has its own {' and '.join(own)}"
    if cut == "rows":
        yield (
            f"--context-parallel-size by rows cuts images and logits, and {why}; use --context-parallel-cut samples, "
            "or tokens for sequences"
        )
    if config.windows > 1:
        yield f"--bptt-steps {training.bptt_steps} cuts images and logits in time, and {why}; leave it out"
    if mixing := config.data.changed("mixup_alpha", "cutmix_alpha"):
        yield f"{' and '.join(mixing)} mixes images and their classes, and {why}; leave it out"
    if "loss" in own:
        usual = TrainingConfig()
        of_loss = [name for name in ("loss", "label_smoothing") if getattr(training, name) != getattr(usual, name)]
        if of_loss:
            yield f"{' and '.join(map(flag, of_loss))} is for classes by --loss, and {why}; leave it out"


def _evaluation_problems(config: PretrainConfig) -> Iterator[str]:
    options = config.checkpoint
    evaluates_only = config.training.evaluate_only
    if evaluates_only and options.load is None:
        yield "--evaluate-only needs --load"
    if options.keep_best and config.logging.eval_interval is None and not evaluates_only:
        yield "--keep-best needs --eval-interval: it keeps the best evaluation of the training"
    if not (options.ema or evaluates_only or options.finetune or options.loads_weights):
        yield (
            "--no-ema is for --evaluate-only, --finetune and weight files: a run that continues loads the weights and "
            "their average"
        )
    if config.data.data_path == SAMPLE or config.data.valid_data_path is not None:
        return
    asked = ["--evaluate-only"] if evaluates_only else []
    for name in ("eval_interval", "eval_iters"):
        value = getattr(config.logging, name)
        if value:
            asked.append(f"{flag(name)} {value}")
    needed = "pretrain(..., valid_dataset=...)" if config.data.is_in_python else "--valid-data-path"
    for each in asked:
        yield f"{each} needs {needed}"


def _schedule_problems(config: PretrainConfig) -> Iterator[str]:
    """Warm-up and cool-down longer than the training, where the flags count alike; otherwise the data decide."""
    training = config.training
    rates = config.optimizer
    if training.evaluate_only:
        return
    if training.train_epochs is not None and rates.lr_warmup_epochs + rates.lr_cooldown_epochs > training.train_epochs:
        names = [name for name in ("lr_warmup_epochs", "lr_cooldown_epochs") if getattr(rates, name)]
        asked = " and ".join(as_flag(name, getattr(rates, name)) for name in names)
        yield f"{asked}: longer than --train-epochs {training.train_epochs}; lower these, or raise --train-epochs"
    if training.train_iters is not None and rates.lr_warmup_iters > training.train_iters:
        warm_up = f"--lr-warmup-iters {rates.lr_warmup_iters}"
        yield f"{warm_up}: longer than --train-iters {training.train_iters}; lower it, or raise --train-iters"


def _mixing_problems(config: PretrainConfig) -> Iterator[str]:
    if not config.data.mixes or LOSSES[config.training.loss].mixes:
        return
    asked = " and ".join(config.data.changed("mixup_alpha", "cutmix_alpha"))
    able = " or ".join(name for name, loss in LOSSES.items() if loss.mixes)
    yield f"{asked} makes labels probabilities, and --loss {config.training.loss} takes classes; use {able}"


def _neuron_problems(config: PretrainConfig) -> Iterator[str]:
    neuron = config.neuron
    # auto takes plain PyTorch where no kernel has the neuron.
    if neuron.neuron_backend in BACKENDS.also:
        return
    lacks = BACKENDS[neuron.neuron_backend].lacks(neuron.neuron, neuron.surrogate)
    if lacks is not None:
        yield f"--neuron-backend {neuron.neuron_backend}: {lacks}; use auto or torch"
