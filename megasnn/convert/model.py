"""The model that a checkpoint's configuration describes, without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megasnn.checkpoint.errors import CheckpointError
from megasnn.config import ModelConfig, PretrainConfig, from_dict
from megasnn.convert.source import TensorSource
from megasnn.models.building import describe
from megasnn.models.description import ModelDescription
from megasnn.models.dialects import model_of
from megasnn.models.model import Model, run_config
from megasnn.models.table import MODELS


@dataclass(frozen=True)
class SavedModel:
    """
    Attributes:
        name: in the table of models.
        config: the dimensions.
        description: the layers.
    """

    name: str
    config: ModelConfig
    description: ModelDescription


def saved_model(source: TensorSource) -> SavedModel:
    """The model that a source's weights are of.

    Raises:
        CheckpointError: it is none of the table of models, or there is no configuration of it (weights from elsewhere).
    """
    config, model = source.facts.config, model_of(source.facts.model, source.tensors)
    if config is None:
        raise CheckpointError(
            f"{source.path} holds weights without a model configuration, so how its tensors are cut is not known; "
            "start a run from it with --load ... --finetune: what that run saves can be laid out"
        )
    if model is None:
        raise CheckpointError(f"{source.path} is of a model that is unknown here; known: {', '.join(MODELS)}")
    return configured_model(model, config, source.path)


def configured_model(model: type[Model], config: Mapping[str, Any], path: object) -> SavedModel:
    """The model of a saved configuration {"model": ..., "neuron": ...}.

    Raises:
        CheckpointError: it is no configuration of this model, or one that cannot be.
    """
    try:
        run: PretrainConfig = from_dict(run_config(model), {part: config[part] for part in ("model", "neuron")})
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not of the model {model.name} as it is here: {error}") from None
    if problems := run.model.problems(tensor_parallel=1):  # before its layers are counted out
        raise CheckpointError(f"{path}: there is no model {model.name} like this:", *problems)
    try:
        described = describe(run.model, run.neuron.spec)
    except ValueError as error:
        raise CheckpointError(f"{path}: there is no model {model.name} like this: {error}") from None
    return SavedModel(model.name, run.model, described)
