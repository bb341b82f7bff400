"""From a model and flags to what is built: configuration, description, layer context, plan, chunks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megasnn.augment.mixing import Mixing
from megasnn.common.checks import error_context
from megasnn.common.launcher import take_ranks
from megasnn.config import ConfigError, PretrainConfig, validate
from megasnn.config.checks import refusal
from megasnn.config.training import PRECISIONS
from megasnn.config.validate import cut_problems
from megasnn.config.values import build_part, to_dict, with_keywords
from megasnn.engine.model import DistributedModel
from megasnn.engine.replica import build_replica
from megasnn.kernels.backends import BACKENDS, backend_for
from megasnn.layers.context import BuildContext, Numerics
from megasnn.layers.weight_grad import CastWeights
from megasnn.models.build import building_problems, describe_model
from megasnn.models.description import ModelDescription
from megasnn.models.model import Model, run_config
from megasnn.optim.scales import learning_rate_scales
from megasnn.parallel.agreement import gather
from megasnn.parallel_state import Group, ParallelState
from megasnn.pipeline.graphs import Capture, CudaCapture
from megasnn.pipeline.plan import plan_pipeline

_ENDLESS = 10**12  # steps of a training whose learning rate does not decay
_PER_HOST = ("data", "checkpoint", "logging")  # parts of a run that may differ: paths, workers


def run_configuration(
    model: Model | PretrainConfig, flags: Mapping[str, Any], has_schedule: bool = False
) -> PretrainConfig:
    """Returns the whole configuration of a model's training, validated; one that is given stays as it is. With
    `has_schedule` the learning rate comes from a function of the user's own.

    Raises:
        ConfigError: flags that do not go together, or a model that cannot be built.
        ValueError: flags beside a whole configuration or `lr_schedule`, a value that is no model, or processes of a
            launcher's that cannot meet.
    """
    of_rate = [name for name in flags if name.startswith(("lr", "min_lr")) and name != "lr_scale"]
    if has_schedule and of_rate:
        raise ValueError(f"lr_schedule gives the learning rate of each step: leave out {', '.join(of_rate)}")
    if isinstance(model, PretrainConfig):
        if refused := [*flags, *["lr_schedule"] * has_schedule]:
            raise ValueError(f"{', '.join(refused)} beside a whole configuration: give a model and flags")
        return model
    if not isinstance(model, Model):
        raise ValueError(f"give an instance of a subclass of megasnn.Model, such as MyModel(...), not {model!r}")
    build_part(type(model), to_dict(model), type(model).__name__)  # refuses values of other types
    config = with_keywords(run_config(type(model))(model=model), flags)
    if config.training.train_iters is None and config.training.train_samples is None:
        if config.optimizer.lr_decay_style != "constant" and not has_schedule:
            raise ConfigError(
                ["give train_iters or train_samples: the learning rate decays until then; or lr_decay_style='constant'"]
            )
        config = replace(config, training=replace(config.training, train_iters=_ENDLESS))
    if not dist.is_initialized():
        take_ranks()
    validate(config, dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1")))
    if problems := model_problems(config):
        raise ConfigError(problems)
    return config


def model_problems(config: PretrainConfig) -> list[str]:
    """Returns why the layers of the model cannot be built, or do not fit together."""
    parallel = config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    problems = building_problems(config.model, config.neuron.spec, tp, cp, config.context_cut)
    if problems:
        return problems
    description = describe_model(config.model, config.neuron.spec)
    problems += refusal(learning_rate_scales, config.optimizer, description)
    return problems + cut_problems(parallel, [each.layer_group for each in description.layers])


def require_alike(config: PretrainConfig, world: Group) -> None:
    """Raises ValueError on every rank where one is given another model or other flags than the first. Collective."""
    parts = {part: values for part, values in to_dict(config).items() if part not in _PER_HOST}
    flags = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    first, *others = gather(world.handle, {"model": config.model.name, **flags})
    for rank, theirs in enumerate(others, start=1):
        if names := [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]:
            raise ValueError(f"give every rank the same model and flags: rank {rank} differs in {', '.join(names)}")


def require_kernels(config: PretrainConfig, device: torch.device) -> None:
    """Raises ValueError where this device does not have the `--neuron-backend` that is asked for."""
    name = config.neuron.neuron_backend
    if name not in BACKENDS.also:
        products = getattr(torch, PRECISIONS[config.training.precision].products)
        backend_for(name, torch.empty(1, 1, 1, dtype=products, device=device), config.neuron.spec)


def mixing_of(config: PretrainConfig, epoch_samples: int) -> Mixing | None:
    """Returns how samples are mixed with each other (mixup, CutMix); None where they are not."""
    data = config.data
    if not data.mixes:
        return None
    until = data.mixup_off_epoch * epoch_samples if data.mixup_off_epoch else None
    height, width = config.model.input_shape[-2:]
    alphas = data.mixup_alpha or None, data.cutmix_alpha or None
    return Mixing(config.training.seed, *alphas, config.model.num_classes, (height, width), until)


def capture_on(device: torch.device) -> Capture:
    """Returns what makes CUDA graphs on a device. Raises ValueError where there are none."""
    if device.type != "cuda":
        raise ValueError(f"--cuda-graphs on: this rank computes on a {device.type.upper()}; use off")
    return CudaCapture(device)


def build_model(
    config: PretrainConfig, description: ModelDescription, state: ParallelState, wants_to_stop: Callable[[], bool]
) -> DistributedModel:
    """Plans the pipeline, and builds this rank's part of the model. Collective."""
    training = config.training
    graphs = capture_on(state.device) if training.cuda_graphs == "on" else None
    context = BuildContext(
        state=state,
        numerics=Numerics.of_run(config, state.device),
        cut=config.context_cut,
        stateful=config.windows > 1,
        seed=training.seed,
        cast_weights=CastWeights(stay=graphs is not None),
    )
    with error_context("while building the model"):
        built = description.build(context)
    with error_context("while planning the pipeline"):
        plan = plan_pipeline(config, description, context, built)
    with error_context("while building the model"):
        made = build_replica(config, description, built, context, plan, wants_to_stop)
        for chunk in made.chunks.values():
            if graphs is not None:
                chunk.capture_graphs(graphs)
        return made
