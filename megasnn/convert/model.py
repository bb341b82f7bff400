"""The model that a checkpoint's configuration describes, without building it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megasnn.checkpoint.errors import CheckpointError
from megasnn.config.checks import ConfigError
from megasnn.config.model import ModelConfig, SpikformerConfig
from megasnn.config.neuron import NeuronConfig
from megasnn.config.pretrain import PretrainSpikformerConfig
from megasnn.config.serialise import from_dict
from megasnn.models.description import ModelDescription
from megasnn.models.spikformer import describe_spikformer
from megasnn.training.setup import neuron_spec


@dataclass(frozen=True)
class SavedModel:
    """
    Attributes:
        config: the dimensions.
        description: the layers.
        unit_of_layer: for each layer its unit, for explicit layouts.
    """

    config: ModelConfig
    description: ModelDescription
    unit_of_layer: Sequence[str]


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
        spikformer = from_dict(SpikformerConfig, config["model"])
        run = PretrainSpikformerConfig(spikformer, from_dict(NeuronConfig, config["neuron"]))
    except (ConfigError, KeyError) as error:
        raise CheckpointError(f"{path} is of a model that is unknown here: {error}") from None
    return SavedModel(spikformer, describe_spikformer(spikformer, neuron_spec(run)), spikformer.unit_of_layer())
