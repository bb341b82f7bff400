"""All checks of a whole configuration, before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megasnn.config.checks import ConfigError, flag
from megasnn.config.names import unknown_names
from megasnn.config.pretrain import PretrainConfig
from megasnn.config.training import LENGTHS
from megasnn.config.validate_layout import (
    cost_problems,
    grid_problems,
    partition_problems,
    recompute_problems,
    replica_problems,
)
from megasnn.kernels import BACKENDS
from megasnn.losses import LOSSES
from megasnn.optimizers import OPTIMIZERS
from megasnn.precisions import PRECISIONS
from megasnn.schedule.named import looks_at_costs
from megasnn.schedule.passes import NEVER


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
    problems = [*of_model, *(problem for part in others for problem in part.problems())]
    problems += layout_problems(config, world_size, config.model.units if not problems else None)
    problems += _length_problems(config) + _evaluation_problems(config)
    problems += _mixing_problems(config) + _window_problems(config)
    problems += _kernel_problems(config) + _profile_problems(config) + _waiting_problems(config)
    if not config.logging.problems():
        problems += _trace_problems(config, world_size)
    if problems:
        raise ConfigError(problems)


def layout_problems(config: PretrainConfig, world_size: int, units: Callable[[], Sequence[str]] | None) -> list[str]:
    """What cannot be on so many ranks, of a configuration that one rank can have.

    Args:
        units: gives the unit of each layer; None where the model's dimensions are wrong.
    """
    problems = config.parallel.problems()
    sound = not problems
    problems += grid_problems(config, world_size)
    if sound and units is not None:
        problems += partition_problems(config, units)
    if not problems and units is not None:
        problems += replica_problems(config, world_size)
    problems += _optimizer_problems(config, world_size) + recompute_problems(config)
    problems += cost_problems(config)
    return problems + _wire_problems(config) + _arithmetic_problems(config) + _graph_problems(config)


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
    return _epoch_problems(config) if trains else []


def _epoch_problems(config: PretrainConfig) -> list[str]:
    """Warm-up and cool-down in epochs against a length in epochs; another length is known with the data."""
    epochs, course = config.training.train_epochs, config.optimizer
    if epochs is None or course.lr_warmup_epochs + course.lr_cooldown_epochs <= epochs:
        return []
    return [
        f"--lr-warmup-epochs {course.lr_warmup_epochs} and --lr-cooldown-epochs {course.lr_cooldown_epochs} are "
        f"together more than --train-epochs {epochs}"
    ]


def _evaluation_problems(config: PretrainConfig) -> list[str]:
    """Evaluation that was asked for, without anything to evaluate on; one alone, without anything to evaluate."""
    data, logging, options = config.data, config.logging, config.checkpoint
    wrong = []
    if config.training.evaluate_only:
        if options.load is None and options.load_spikingjelly is None:
            wrong.append("--evaluate-only needs --load or --load-spikingjelly")
        if options.save:
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
    """`--profile-steps` of iterations or ranks that there are not, without a folder; what is of GPUs alone."""
    options, asked = config.logging, f"--profile-steps {config.logging.profile_steps}"
    wrong = []
    if options.nvtx_ranges and config.parallel.device == "cpu":
        wrong.append("--nvtx-ranges is for NVIDIA's tools on GPUs: leave it out with --device cpu")
    if options.profile_steps is None:
        return wrong
    if config.training.evaluate_only:
        wrong.append(f"{asked} has no meaning with --evaluate-only")
    writes = options.record_memory_history or not options.nvtx_ranges
    if writes and config.checkpoint.save is None and options.tensorboard_dir is None:
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
    if config.parallel.context_parallel_size > 1:
        return "with --context-parallel-size above 1 ranks exchange inside of layers"
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
    schedule, scatters = parallel.pipeline_schedule, parallel.weight_gradients == "scattered"
    if training.deterministic and scatters and parallel.pipeline_model_parallel_size > 1 and looks_at_costs(schedule):
        wrong.append(
            f"--deterministic with --weight-gradients scattered and --pipeline-schedule {schedule}: which gradients "
            "are sent together depends on the order, which follows from measured times; use a schedule with a fixed "
            "order (1f1b), or --weight-gradients once"
        )
    return wrong
