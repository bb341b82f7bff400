"""Registry of models, and of their tensor names in other programs.

A new model is a folder beside this file and an entry here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from megasnn.common.files import CheckpointError, raise_problems
from megasnn.common.registry import Registry
from megasnn.config import PretrainConfig, from_dict
from megasnn.models.e_spikeformer.model import ESpikeFormer
from megasnn.models.model import Model, run_config
from megasnn.models.qkformer.model import QKFormer
from megasnn.models.sew_resnet.model import SewResNet
from megasnn.models.spike_driven.model import SpikeDrivenTransformer
from megasnn.models.spike_lm.model import SpikeLM
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.models.weight_names import Dialect

if TYPE_CHECKING:
    from megasnn.models.description import ModelDescription

MODELS: Registry[type[Model]] = Registry(
    "model",
    {
        each.name: each
        for each in (Spikformer, VggDvs, SewResNet, QKFormer, SpikeDrivenTransformer, ESpikeFormer, SpikeLM)
    },
)


def all_dialects() -> list[Dialect]:
    dialects = list[Dialect]()
    for entry in MODELS.values():
        dialects += entry.dialects()
    return dialects


def model_of(model: str | None, ours: Collection[str]) -> type[Model] | None:
    """A model's class from its saved name or its weights; None if no marker matches.

    Args:
        model: saved name; None looks for markers in `ours`.
        ours: global tensor names.
    Raises:
        CheckpointError: the registry lacks the name.
    """
    if model is None:
        # Files of weights alone name no model.
        return next((each for each in MODELS.values() if each.marker in ours), None)
    try:
        return MODELS[model]
    except ValueError as error:
        own = "a class of your own is exported with --names megasnn, and read by megasnn.load_model(..., model=CLASS)"
        raise CheckpointError(f"{error}; {own}") from None


def saved_model(
    where: object, model: type[Model], config: Mapping[str, Any]
) -> tuple[PretrainConfig, ModelDescription]:
    """Rebuilds a saved model's configuration and description.

    Args:
        config: saved dimensions and neuron, {"model": {...}, "neuron": {...}}.
    Raises:
        CheckpointError: the model cannot have these dimensions.
    """
    from megasnn.models.build import describe_model  # imports torch

    title = f"{where}: there is no model {model.name} like this:"
    try:
        parts = {part: config[part] for part in ("model", "neuron")}
        run: PretrainConfig = from_dict(run_config(model), parts)
        raise_problems(title, run.model.problems(tensor_parallel=1))
        return run, describe_model(run.model, run.neuron.spec)
    # A metadata.json of another program may lack a part, or hold other types.
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{title} {error}") from None


def dialect_of(names: Collection[str]) -> Dialect:
    """The dialect with another program's tensor names. Raises CheckpointError for unknown ones."""
    dialects = all_dialects()
    for dialect in dialects:
        if dialect.marker in names:
            return dialect
    known = ", ".join(f"{dialect.marker} ({dialect.title})" for dialect in dialects)
    raise CheckpointError(
        f"names like {', '.join(sorted(names)[:3]) or '(none)'} belong to no program known here; looked for {known}"
    )


def dialect_for(program: str, ours: Collection[str], model: str | None = None) -> Dialect:
    """A program's dialect for one of MegaSNN's models.

    Raises:
        CheckpointError: the program has no such model, or the registry lacks it.
    """
    entry = model_of(model, ours)
    dialects = () if entry is None else entry.dialects()
    for dialect in dialects:
        if dialect.name == program:
            return dialect
    known = ", ".join(f"{dialect.name} ({dialect.title})" for dialect in all_dialects())
    tensors = f"tensors like {sorted(ours)[0]}" if entry is None else f"the tensors of {entry.name}"
    raise CheckpointError(f"there is no model of {program} with {tensors}; known: {known}")
