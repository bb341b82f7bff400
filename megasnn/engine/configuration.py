"""The whole configuration of a model's training, checked, and alike on all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megasnn.config import ConfigError, PretrainConfig, validate
from megasnn.config.values import build_part, to_dict, with_keywords
from megasnn.models.model import Model, run_config
from megasnn.models.problems import building_problems
from megasnn.models.table import MODELS
from megasnn.parallel.agreement import gather
from megasnn.parallel_state import Group

_ENDLESS = 10**12  # steps of a training whose learning rate does not decay


def configuration(model: Model | PretrainConfig, flags: Mapping[str, Any]) -> PretrainConfig:
    """The whole configuration of a model's training, validated; one that is given stays as it is.

    Raises:
        ConfigError: flags that do not go together, or a model that cannot be built.
        ValueError: flags beside a whole configuration, or what is no model.
    """
    if isinstance(model, PretrainConfig):
        if flags:
            raise ValueError(f"{', '.join(flags)} beside a whole configuration: put them into that")
        return model
    if not isinstance(model, Model):
        made = ""
        if isinstance(model, type) and issubclass(model, Model):
            made = f": {model.__name__}(...)"
        elif isinstance(model, str) and model in MODELS:
            made = f": megasnn.MODELS[{model!r}](...)"
        raise ValueError(f"give an instance of a subclass of megasnn.Model, not {model!r}{made}")
    build_part(type(model), to_dict(model), type(model).__name__)  # refuses values of other types
    config = with_keywords(run_config(type(model))(model=model), flags)
    if config.training.train_iters is None:
        if config.optimizer.lr_decay_style != "constant":
            raise ConfigError(["give train_iters: the learning rate decays until then; or lr_decay_style='constant'"])
        config = replace(config, training=replace(config.training, train_iters=_ENDLESS))
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    validate(config, ranks)
    neuron, parallel = config.neuron, config.parallel
    problems = building_problems(
        config.model,
        neuron.spec,
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.context_cut(config.training.micro_batch_size),
    )
    if problems:
        raise ConfigError(problems)
    return config


def require_alike(config: PretrainConfig, world: Group) -> None:
    """Raises ValueError on every rank where one is given another model or other flags than the first. Collective."""
    flags = {f"{part}.{name}": value for part, values in to_dict(config).items() for name, value in values.items()}
    first, *others = gather(world.handle, {"model": config.model.name, **flags})
    for rank, given in enumerate(others, start=1):
        names = [name for name in {**first, **given} if first.get(name) != given.get(name)]
        if names:
            raise ValueError(
                f"every rank is to be given the same model and flags, but those of rank {rank} differ from rank 0's: "
                f"{', '.join(names)}"
            )
