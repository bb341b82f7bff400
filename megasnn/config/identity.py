"""Parts of a configuration that a checkpoint keeps: the identity of the model, and flags that a run may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megasnn.config.checks import flag
from megasnn.config.data import CHANGES, DataConfig
from megasnn.config.pretrain import PretrainConfig
from megasnn.config.values import to_dict
from megasnn.files import in_message
from megasnn.optimizers import DECAY_STYLES, OPTIMIZERS

NORMALISATION = "normalisation"
"""Under which a checkpoint keeps the name of the constants that images were normalised by."""
Identity = dict[str, dict[str, object]]
"""Dimensions and neuron of a model, as `identity` gives them."""
_UPDATE = {
    "training": (
        *("micro_batch_size", "global_batch_size", "bptt_steps", "seed", "precision", "loss", "label_smoothing"),
    ),
    "data": ("augment", *CHANGES, "shuffle", "last_batch"),
}


def identity(config: PretrainConfig) -> Identity:
    """Dimensions, whatever the variant is called or how it is cut over ranks, and neuron, whatever its backend."""
    dimensions: Any = config.model
    model, neuron = to_dict(dimensions), to_dict(config.neuron)
    for entry in fields(dimensions):
        if entry.metadata.get("same_function"):
            del model[entry.name]
    del neuron["neuron_backend"]
    return {"model": model, "neuron": neuron}


def recipe(config: PretrainConfig) -> dict[str, object]:
    """Flags that change the update, and that a run may change on its way."""
    of_others = {name for entry in OPTIMIZERS.values() for name in entry.flags}
    of_others -= set(OPTIMIZERS[config.optimizer.optimizer].flags)
    names = {"optimizer": tuple(each.name for each in fields(config.optimizer)), **_UPDATE}
    if DECAY_STYLES[config.optimizer.lr_decay_style](1.0) < 1.0:  # the rate follows from the length
        names["training"] += "train_iters", "train_epochs"
    return {
        flag(name): getattr(getattr(config, part), name)
        for part, of_part in names.items()
        for name in of_part
        if name not in of_others
    }


def changed_recipe(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """One line for a user about flags that differ from those of the run that saved, which is allowed.

    Args:
        saved: kept by the run beside its tensors. now: as `recipe` gives it.
    """
    before = saved.get("recipe")
    if not isinstance(before, Mapping):  # weights from elsewhere
        return []
    changed = {name: (before.get(name), value) for name, value in now.items() if before.get(name) != value}
    return _line("changed since the checkpoint was saved: ", changed)


def _line(title: str, changed: Mapping[str, tuple[object, object]]) -> list[str]:
    texts = [f"{name} from {in_message(before)} to {now}" for name, (before, now) in changed.items()]
    return [title + ", ".join(texts)] if texts else []


def normalisation(config: PretrainConfig) -> str | None:
    """Name of the constants by which a run normalises images; None of other samples."""
    shape = config.model.input_shape
    return config.data.normalisation(shape[0], config.training.evaluate_only) if len(shape) == 3 else None


def samples_from(saved: Mapping[str, object], config: PretrainConfig) -> dict[str, object]:
    """Values of `DataConfig` by which samples become those that a checkpoint was trained on, where this configuration,
    of an evaluation or of --finetune, gives none and makes them otherwise.

    Args:
        saved: kept by the run beside its tensors. config: not yet with these values.
    """
    data, before = config.data, saved.get("recipe")
    trained = before.get("--augment") if isinstance(before, Mapping) else None
    augments = data.augment not in (DataConfig.augment, trained)
    return {
        name: value
        for name, (value, _) in _other_samples(saved, config).items()
        if value is not None
        and getattr(data, name) == getattr(DataConfig, name)
        and not (name == "normalize_images" and augments)
    }


def changed_samples(saved: Mapping[str, object], config: PretrainConfig) -> list[str]:
    """One line for a user where an evaluation or --finetune makes samples otherwise than the training that saved."""
    changed = {flag(name): values for name, values in _other_samples(saved, config).items()}
    return _line("samples are made otherwise than those that the checkpoint was trained on: ", changed)


def _other_samples(saved: Mapping[str, object], config: PretrainConfig) -> dict[str, tuple[object, object]]:
    """Fields of `DataConfig` that change what is evaluated, with their values in training and now, where they differ;
    with --finetune the constants alone."""
    data, frames, flags = config.data, saved.get("frames"), saved.get("recipe")
    if not isinstance(frames, Mapping) or not isinstance(flags, Mapping):  # an Engine's, which has no samples
        return {}
    found: dict[str, tuple[object, object]] = {"normalize_images": (saved.get(NORMALISATION), normalisation(config))}
    if config.training.evaluate_only:
        found["center_crop"] = flags.get("--center-crop"), data.center_crop
        found["split_by"] = frames.get("split_by") or "number", data.split_by or "number"
    return {name: (value, now) for name, (value, now) in found.items() if value != now}
