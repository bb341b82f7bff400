"""All checks of a whole configuration, before anything is built."""

from __future__ import annotations

from megasnn.batching import micro_batches_of
from megasnn.config.checks import ConfigError, flag, refusal
from megasnn.config.names import unknown_names
from megasnn.config.pretrain import PretrainConfig
from megasnn.config.training import LENGTHS
from megasnn.grid import Grid
from megasnn.kernels import BACKENDS
from megasnn.losses import LOSSES
from megasnn.optimizers import OPTIMIZERS
from megasnn.precisions import PRECISIONS
from megasnn.schedule.named import least_held
from megasnn.schedule.partition import layout_to_bounds
from megasnn.schedule.refine import NEVER


def validate(config: PretrainConfig, world_size: int) -> None:
    """Raises ConfigError that lists every problem of the parts and between them, each with value and flag."""
    parallel = config.parallel
    others = (
        config.neuron,
        config.training,
        config.optimizer,
        config.data,
        config.checkpoint,
        config.logging,
    )
    unknown = [problem for part in (config.model, parallel, *others) for problem in unknown_names(part)]
    if unknown:
        raise ConfigError(unknown)
    of_model = config.model.problems(parallel.tensor_model_parallel_size)
    of_parallel = parallel.problems()
    problems = [*of_model, *of_parallel, *(problem for part in others for problem in part.problems())]
    problems += _grid_problems(config, world_size)
    if not of_model and not of_parallel:
        problems += _partition_problems(config)
    if len(problems) == 0:
        problems += _memory_problems(config, world_size) + _replica_problems(config, world_size)
    problems += _length_problems(config) + _evaluation_problems(config) + _optimizer_problems(config, world_size)
    problems += _mixing_problems(config) + _window_problems(config) + _recompute_problems(config)
    problems += _kernel_problems(config) + _wire_problems(config) + _profile_problems(config)
    problems += _arithmetic_problems(config) + _waiting_problems(config)
    problems += _graph_problems(config)
    if not config.logging.problems():
        problems += _trace_problems(config, world_size)
    if problems:
        raise ConfigError(problems)


def _grid_problems(config: PretrainConfig, world_size: int) -> list[str]:
    """The world size, and whether there is work for every replica."""
    tensor = config.parallel.tensor_model_parallel_size
    pipeline = config.parallel.pipeline_model_parallel_size
    weight = config.parallel.weight_parallel_size
    if min(tensor, pipeline, weight) < 1:
        return []  # reported by ParallelConfig
    try:
        grid = Grid.fit(world_size, tensor, pipeline, weight)
    except ValueError as error:
        return [str(error)]
    training = config.training
    if min(training.micro_batch_size, training.global_batch_size) < 1:
        return []  # reported by TrainingConfig
    if training.micro_batches >= grid.replicas:
        return _sharing_problems(config, grid)
    return [
        f"--global-batch-size {training.global_batch_size} with "
        f"--micro-batch-size {training.micro_batch_size} is {training.micro_batches} micro-batch(es), but there "
        f"are {grid.replicas} data parallel replicas (world size {world_size} / tensor {tensor} / pipeline "
        f"{pipeline}) and each needs at least one"
    ]


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


def _partition_problems(config: PretrainConfig) -> list[str]:
    """Whether the model's layers can be laid out on the pipeline's chunks."""
    parallel = config.parallel
    if parallel.layout is None and parallel.chunks == 1:
        return []
    units = config.model.units()
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


def _memory_problems(config: PretrainConfig, world_size: int) -> list[str]:
    """A fixed order that holds more than the memory limit; what a search has to find out is refused by the search."""
    parallel = config.parallel
    limit = parallel.pipeline_memory_limit
    if limit is None:
        return []
    stages, name = parallel.pipeline_model_parallel_size, parallel.pipeline_schedule
    replicas = Grid.fit(world_size, parallel.tensor_model_parallel_size, stages).data
    most = len(micro_batches_of(config.training.micro_batches, replicas, 0))
    most *= config.training.windows(config.model.time_steps)
    held = least_held(name, stages, most, parallel.chunks_per_rank)
    if held <= limit:
        return []
    return [
        f"--pipeline-schedule {name} holds the activations of {held:g} micro-batches on a rank, with {stages} stages "
        f"and {most} micro-batches, where --pipeline-memory-limit allows {limit:g}; auto searches within the limit"
    ]


def _recompute_problems(config: PretrainConfig) -> list[str]:
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


def _replica_problems(config: PretrainConfig, world_size: int) -> list[str]:
    """Whether there are ranks to compare, and enough of them for a majority."""
    parallel = config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    grid = Grid.fit(world_size, tensor, pipeline, parallel.weight_parallel_size)
    sizes = f"world size {world_size} / tensor {tensor} / pipeline {pipeline}" + (
        f" / weight {grid.weight}" if grid.weight > 1 else ""
    )
    if parallel.replica_mismatch == "majority" and grid.data < 3:
        return [
            f"--replica-mismatch majority needs three data parallel replicas or more, and there are {grid.data} "
            f"({sizes}); use stop"
        ]
    if parallel.check_replicas_interval and grid.replicas * grid.tensor == 1:
        return [
            f"--check-replicas-interval {parallel.check_replicas_interval} compares ranks that hold the same, and "
            f"there are none ({sizes}); leave the flag out"
        ]
    return []


def _length_problems(config: PretrainConfig) -> list[str]:
    """A training without a length; warm-up against the length."""
    warm_up = config.optimizer.lr_warmup_iters
    training = config.training
    trains = not (training.evaluate_only or config.logging.model_summary)
    if trains and all(getattr(training, name) is None for name in LENGTHS):
        return [f"give one of {', '.join(map(flag, LENGTHS))}; none was given"]
    if training.global_batch_size < 1:
        return []  # reported by TrainingConfig
    if config.data.last_batch == "keep" and training.train_samples is not None:
        return [
            "--last-batch keep makes batches of several sizes: give --train-iters or --train-epochs rather than "
            "--train-samples"
        ]
    if training.iterations is not None and warm_up > training.iterations:
        length = f"--train-iters {training.iterations}"
        if training.train_iters is None:
            length = f"the {training.iterations} iterations of --train-samples {training.train_samples}"
        return [f"--lr-warmup-iters {warm_up} is more than {length}"]
    return []


def _evaluation_problems(config: PretrainConfig) -> list[str]:
    """Evaluation that was asked for, without anything to evaluate on; one alone, without anything to evaluate."""
    data, logging, options = config.data, config.logging, config.checkpoint
    wrong = []
    if config.training.evaluate_only:
        if options.load is None and options.load_spikingjelly is None:
            wrong.append("--evaluate-only needs --load or --load-spikingjelly")
        if options.save is not None:
            wrong.append(f"--evaluate-only saves nothing: leave --save {options.save} out")
        if logging.eval_iters == 0:
            wrong.append("--evaluate-only has no meaning with --eval-iters 0")
    elif options.keep_best and logging.eval_interval is None:
        wrong.append("--keep-best needs --eval-interval: the best of what is evaluated on the way")
    if data.data_path == "sample" or data.valid_data_path is not None:
        return wrong
    asked = [("--eval-interval", logging.eval_interval), ("--eval-iters", logging.eval_iters)]
    wrong += [f"{name} {value} needs --valid-data-path" for name, value in asked if value]
    return wrong + ["--evaluate-only needs --valid-data-path"] * config.training.evaluate_only


def _optimizer_problems(config: PretrainConfig, world_size: int) -> list[str]:
    """An optimizer that needs whole tensors where a rank has parts of them."""
    parallel, name = config.parallel, config.optimizer.optimizer
    if OPTIMIZERS[name].elementwise:
        return []
    asked = []
    if parallel.tensor_model_parallel_size > 1:
        asked.append(f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size}")
    if parallel.use_distributed_optimizer and world_size > 1:
        asked.append("--use-distributed-optimizer")
    if parallel.weight_parallel_size > 1:
        asked.append(f"--weight-parallel-size {parallel.weight_parallel_size}")
    return [
        f"--optimizer {name} needs whole tensors, and with {flag} a rank updates parts of them; leave it out, or take "
        f"another optimizer ({', '.join(other for other, recipe in OPTIMIZERS.items() if recipe.elementwise)})"
        for flag in asked
    ]


def _mixing_problems(config: PretrainConfig) -> list[str]:
    """Mixed samples without a partner, or with a loss that takes classes only."""
    data, training = config.data, config.training
    if not data.mixes:
        return []
    asked = " and ".join(flag(name) for name in ("mixup_alpha", "cutmix_alpha") if getattr(data, name) is not None)
    wrong = []
    if training.micro_batch_size == 1:
        wrong.append(f"{asked}: samples of one micro-batch are mixed; set --micro-batch-size to 2 or more")
    if not LOSSES[training.loss].mixes:
        able = " or ".join(name for name, loss in LOSSES.items() if loss.mixes)
        wrong.append(f"{asked}: labels become probabilities, and --loss {training.loss} takes classes; use {able}")
    return wrong


def _window_problems(config: PretrainConfig) -> list[str]:
    """Time steps that are no whole number of windows."""
    steps, time_steps = config.training.bptt_steps, config.model.time_steps
    if steps is None or steps < 1 or time_steps % steps == 0:
        return []
    return [f"--time-steps {time_steps} does not divide by --bptt-steps {steps}"]


def _kernel_problems(config: PretrainConfig) -> list[str]:
    """A backend that cannot compute the neuron."""
    neuron = config.neuron
    if neuron.neuron_backend in BACKENDS.also:
        return []
    lacks = BACKENDS[neuron.neuron_backend].missing(neuron.neuron, neuron.surrogate)
    if lacks is None:
        return []
    return [
        f"--neuron-backend {neuron.neuron_backend} has the {lacks.what}s {' and '.join(lacks.known)}, not "
        f"--{lacks.what} {lacks.name}; use auto or torch"
    ]


def _profile_problems(config: PretrainConfig) -> list[str]:
    """`--profile-pipeline` without pipeline stages."""
    if config.logging.profile_pipeline and config.parallel.pipeline_model_parallel_size == 1:
        return ["--profile-pipeline needs stages: --pipeline-model-parallel-size 2 or more"]
    return []


def _trace_problems(config: PretrainConfig, world_size: int) -> list[str]:
    """`--profile-steps` of iterations or ranks that there are not, without a folder; memory of what is no GPU."""
    options, asked = config.logging, f"--profile-steps {config.logging.profile_steps}"
    if options.profile_steps is None:
        return []
    wrong = []
    if config.training.evaluate_only:
        wrong.append(f"{asked} has no meaning with --evaluate-only")
    if config.checkpoint.save is None and options.tensorboard_dir is None:
        wrong.append(f"{asked} has no folder to write to: give --tensorboard-dir or --save")
    if missing := [rank for rank in options.ranks_to_profile() if rank >= world_size]:
        wrong.append(f"--profile-ranks {options.profile_ranks}: there is no rank {missing[0]}, of {world_size}")
    last = config.training.iterations if config.training.global_batch_size > 0 else None
    if last is not None and options.profiled_steps[0] > last:
        wrong.append(f"{asked} is after the last of {last} iterations")
    if options.record_memory_history and config.parallel.device == "cpu":
        wrong.append("--record-memory-history is of the memory of GPUs: leave it out with --device cpu")
    return wrong


def _waiting_problems(config: PretrainConfig) -> list[str]:
    if config.training.wait_after_actions and config.parallel.device == "cpu":
        return ["--wait-after-actions is for GPUs, not --device cpu: leave it out"]
    return []


def _graph_problems(config: PretrainConfig) -> list[str]:
    """Of --cuda-graphs on: what no layer of a run can be a graph with."""
    if config.training.cuda_graphs != "on":
        return []
    why = no_graphs(config)
    return [] if why is None else [f"--cuda-graphs on: {why}; use auto or off"]


def no_graphs(config: PretrainConfig) -> str | None:
    """Why none of the layers of a run can be CUDA graphs; None where some may."""
    if config.parallel.device == "cpu":
        return "there are none with --device cpu"
    if config.parallel.tensor_model_parallel_size > 1:
        return "with --tensor-model-parallel-size above 1 ranks exchange inside of layers"
    if config.training.windows(config.model.time_steps) > 1:
        return "with --bptt-steps neurons go on from the window before"
    if config.parallel.weight_parallel_size > 1:
        return "with --weight-parallel-size above 1 weights do not stay in memory"
    if config.parallel.recompute != NEVER or config.parallel.memory_budget is not None:
        return "with --recompute or --memory-budget what forward keeps is computed again"
    return None


def _wire_problems(config: PretrainConfig) -> list[str]:
    """A type for gradients between stages that is not narrower than the one they are computed in."""
    asked, precision = config.parallel.pipeline_gradient_dtype, config.training.precision
    if asked is None or PRECISIONS[precision].products == "float32":
        return []
    return [
        f"--pipeline-gradient-dtype {asked} with --precision {precision}: gradients between stages are {precision} "
        f"there; leave the flag out"
    ]


def _arithmetic_problems(config: PretrainConfig) -> list[str]:
    """Arithmetic that the device does not have, and a rounding that depends on what was measured."""
    parallel, training = config.parallel, config.training
    wrong = []
    if PRECISIONS[training.precision].rounds and parallel.device == "cpu":
        wrong.append(f"--precision {training.precision} is for GPUs, not --device cpu; use --precision fp32")
    if training.fp32_products == "split" and parallel.device == "cpu":
        wrong.append("--fp32-products split is for GPUs, not --device cpu; use auto or ieee")
    if (
        training.deterministic
        and parallel.pipeline_gradient_dtype == "bf16"
        and parallel.pipeline_model_parallel_layout is None
    ):
        wrong.append(
            "--deterministic with --pipeline-gradient-dtype bf16: results depend on where the model is cut, which is "
            "measured; give --pipeline-model-parallel-layout"
        )
    return wrong
