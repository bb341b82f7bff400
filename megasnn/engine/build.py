"""A run's configuration, checked, and the model built from it on this rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megasnn.augment.mixing import Mixing
from megasnn.common.checks import error_context
from megasnn.common.launcher import take_ranks
from megasnn.config import ConfigError, PretrainConfig, validate
from megasnn.config.training import PRECISIONS
from megasnn.config.validate import cut_problems
from megasnn.config.values import build_part, with_keywords
from megasnn.engine.assemble import assemble_model
from megasnn.engine.model import DistributedModel
from megasnn.kernels.backends import BACKENDS, backend_for
from megasnn.layers.blocks import neuron_uses
from megasnn.layers.context import BuildContext, Numerics
from megasnn.layers.weight_grad import CastWeights
from megasnn.models.build import building_problems, describe_model
from megasnn.models.description import ModelDescription
from megasnn.models.model import Model, run_config
from megasnn.optim.scales import scale_problems
from megasnn.parallel.agreement import gather
from megasnn.parallel_state import Group, ParallelState
from megasnn.pipeline.graph_capture import Capture, CudaCapture
from megasnn.pipeline.plan import plan_pipeline

ENDLESS = 10**12  # steps of a training with a constant learning rate
_PER_HOST = ("data", "checkpoint", "logging")  # configuration that may differ between ranks: paths, workers


def run_configuration(
    model: Model | PretrainConfig, flags: Mapping[str, Any], has_schedule: bool = False
) -> PretrainConfig:
    """Returns the validated configuration. A `PretrainConfig` is returned as it is.

    Args:
        has_schedule: True where the user's function sets the learning rate.
    Raises:
        ConfigError: contradictory flags, or a model that cannot be built.
        ValueError: flags beside a `PretrainConfig`, learning rate flags beside a schedule, another value than a model,
            or a launcher's processes without a meeting point.
    """
    rates = [name for name in flags if name.startswith(("lr", "min_lr")) and name != "lr_scale"]
    if has_schedule and rates:
        raise ValueError(f"lr_schedule gives the learning rate of each step: leave out {', '.join(rates)}")
    if isinstance(model, PretrainConfig):
        refused = list(flags)
        if has_schedule:
            refused.append("lr_schedule")
        if refused:
            raise ValueError(f"{', '.join(refused)} beside a whole configuration: give a model and flags")
        return model
    if not isinstance(model, Model):
        raise ValueError(f"give an instance of a subclass of megasnn.Model, such as MyModel(...), not {model!r}")
    # Refuses values of other types, which a plain dataclass takes.
    build_part(type(model), asdict(model), type(model).__name__)
    config = with_keywords(run_config(type(model))(model=model), flags)
    # A rate that decays needs its end; a constant one does not.
    if config.training.train_iters is None and config.training.train_samples is None:
        if config.optimizer.lr_decay_style != "constant" and not has_schedule:
            raise ConfigError(
                ["give train_iters or train_samples: the learning rate decays until then; or lr_decay_style='constant'"]
            )
        config = replace(config, training=replace(config.training, train_iters=ENDLESS))
    # A program may have joined its ranks itself, without the variables of a launcher.
    if dist.is_initialized():
        world_size = dist.get_world_size()
    else:
        take_ranks()
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if config.training.finds_micro_batch:
        raise ConfigError(["micro_batch_size='auto' is for runs (megasnn.pretrain): give an Engine a number"])
    validate(config, world_size)
    problems = model_problems(config)
    if problems:
        raise ConfigError(problems)
    return config


def model_problems(config: PretrainConfig) -> list[str]:
    """Problems with the layers, their learning rates, and an explicit pipeline layout."""
    parallel = config.parallel
    problems = building_problems(config.model, config.neuron.spec, parallel.grid, config.context_cut)
    if problems:
        return problems
    description = describe_model(config.model, config.neuron.spec)
    problems += scale_problems(config.optimizer, description)
    return problems + cut_problems(parallel, [each.layer_group for each in description.layers])


def require_alike(config: PretrainConfig, world: Group) -> None:
    """Raises ValueError on every rank where one has another model or flags than the first. Collective."""
    mine = {"model": config.model.name}
    for part, values in asdict(config).items():
        if part not in _PER_HOST:
            mine |= {f"{part}.{name}": value for name, value in values.items()}
    first, *others = gather(world.handle, mine)
    for rank, theirs in enumerate(others, start=1):
        names = [name for name in first | theirs if first.get(name) != theirs.get(name)]
        if names:
            raise ValueError(f"give every rank the same model and flags: rank {rank} differs in {', '.join(names)}")


def require_kernels(config: PretrainConfig, device: torch.device) -> None:
    """Raises ValueError where this device has no such `--neuron-backend`."""
    name = config.neuron.neuron_backend
    if name not in BACKENDS.also:
        products = getattr(torch, PRECISIONS[config.training.precision].products)
        backend_for(name, torch.empty(1, 1, 1, dtype=products, device=device), config.neuron.spec)


def mixing_of(config: PretrainConfig, epoch_samples: int) -> Mixing | None:
    """None for neither mixup nor CutMix."""
    data = config.data
    if not data.mixes:
        return None
    until = data.mixup_off_epoch * epoch_samples if data.mixup_off_epoch else None
    height, width = config.model.input_shape[-2:]
    mixup = data.mixup_alpha or None
    cutmix = data.cutmix_alpha or None
    return Mixing(config.training.seed, mixup, cutmix, config.model.num_classes, (height, width), until)


def capture_on(device: torch.device) -> Capture:
    """Raises ValueError for other devices than GPUs."""
    if device.type != "cuda":
        raise ValueError(f"--cuda-graphs on: this rank computes on a {device.type.upper()}; use off")
    return CudaCapture(device)


def _compile_kernels(layers: Sequence[nn.Module], context: BuildContext, trains: bool) -> None:
    """Compiles the neurons' kernels for the CPU, or loads them: once a host, each rank its share."""
    dtype = context.numerics.compute_dtype
    sample = torch.empty(1, 1, 1, dtype=dtype, device=context.state.device)
    name = context.numerics.neuron_backend
    uses = [use for use in neuron_uses(layers) if backend_for(name, sample, use.spec) is BACKENDS["fused"]]
    if not uses:
        return
    from megasnn.kernels.numba.ahead import compile_ahead

    # Ranks that share a folder but not a launcher compile the same kernels in the same order, and wait for each other.
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    compile_ahead(uses, dtype, trains, rank, ranks)


def build_model(
    config: PretrainConfig, description: ModelDescription, state: ParallelState, wants_to_stop: Callable[[], bool]
) -> DistributedModel:
    """Plans the pipeline first. Collective."""
    training = config.training
    graphs = capture_on(state.device) if training.cuda_graphs == "on" else None
    context = BuildContext(
        state=state,
        numerics=Numerics.of_run(config, state.device),
        context_cut=config.context_cut,
        stateful=config.windows > 1,
        seed=training.seed,
        cast_weights=CastWeights(),
    )
    # All layers without memory: the plan decides which of them this rank has, and needs every layer's cost for it.
    with error_context("while building the model"):
        # `build` in models/build.py, with the model and its neuron.
        built = description.build(context)
    with error_context("while compiling kernels"):
        _compile_kernels([each.module for each in built], context, trains=not training.evaluate_only)
    with error_context("while planning the pipeline"):
        plan = plan_pipeline(config, description, context, built)
    with error_context("while building the model"):
        distributed = assemble_model(config, description, built, context, plan, wants_to_stop)
        if graphs is not None:
            for chunk in distributed.chunks.values():
                chunk.capture_graphs(graphs)
        return distributed
