"""The model that a checkpoint's configuration describes, without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megasnn.checkpoint.errors import CheckpointError
from megasnn.config.checks import ConfigError
from megasnn.config.neuron import NeuronConfig
from megasnn.config.pretrain import ModelConfig, PretrainConfig
from megasnn.config.serialise import from_dict
from megasnn.models.description import ModelDescription
from megasnn.models.spikformer.dimensions import SpikformerConfig
from megasnn.models.spikformer.model import describe_spikformer
from megasnn.models.vgg_dvs.dimensions import VggDvsConfig
from megasnn.models.vgg_dvs.model import describe_vgg_dvs
from megasnn.training.setup import neuron_spec

_DEEPEST = 10_000


@dataclass(frozen=True)
class SavedModel:
    """
    Attributes:
        config: the dimensions.
        description: the layers.
    """

    config: ModelConfig
    description: ModelDescription


def saved_model(config: Mapping[str, Any] | None, path: object) -> SavedModel:
    """The model of a checkpoint's configuration {"model": ..., "neuron": ...}.

    Raises:
        CheckpointError: there is none (weights from elsewhere), or it is of no model known here.
    """
    if config is None:
        raise CheckpointError(
            f"{path} holds weights without a model configuration, so how its tensors are cut is not known; "
            "start a run from it with --load ... --finetune: what that run saves can be laid out"
        )
    try:
        neuron = from_dict(NeuronConfig, config["neuron"])
        values = config["model"]
        model: SpikformerConfig | VggDvsConfig = (
            from_dict(VggDvsConfig, values) if "channels" in values else from_dict(SpikformerConfig, values)
        )
    except (ConfigError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is of a model that is unknown here: {error}") from None
    if isinstance(model, SpikformerConfig) and model.depth > _DEEPEST:
        raise CheckpointError(
            f"{path}: config.model.depth: up to {_DEEPEST} blocks can be laid out, found {model.depth}"
        )
    spec = neuron_spec(PretrainConfig(model, neuron))
    layers = describe_vgg_dvs(model, spec) if isinstance(model, VggDvsConfig) else describe_spikformer(model, spec)
    return SavedModel(model, layers)
