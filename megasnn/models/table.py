"""The table of models. A new model is a folder beside this file and an entry here."""

from __future__ import annotations

from collections.abc import Collection

from megasnn.checkpoint.format import Metadata
from megasnn.models.model import Model
from megasnn.models.qkformer.dimensions import QKFormer
from megasnn.models.sew_resnet.dimensions import SewResNet
from megasnn.models.spike_driven.dimensions import SpikeDrivenTransformer
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.models.vgg_dvs.dimensions import VggDvs
from megasnn.registry import Registry

MODELS: Registry[type[Model]] = Registry(
    "model", {model.name: model for model in (Spikformer, VggDvs, SewResNet, QKFormer, SpikeDrivenTransformer)}
)


def guess_model(tensors: Collection[str]) -> type[Model] | None:
    """The model whose tensors have these global names; None when it is none in the table.

    For files of weights, which do not say of which model they are, and for checkpoints from before they said it.
    """
    return next((model for model in MODELS.values() if model.marker in tensors), None)


def saved_model_name(metadata: Metadata) -> str | None:
    """Name of the model that a checkpoint is of, known by its tensors where it does not say it; None where unknown."""
    if metadata.model is not None:
        return metadata.model
    guess = guess_model(metadata.tensors)
    return None if guess is None else guess.name
