"""What a checkpoint keeps of a configuration: what makes two models the same, and what a run may change on its way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megasnn.augment import AUGMENTATIONS
from megasnn.config.checks import flag
from megasnn.config.data import CHANGES, DataConfig
from megasnn.config.pretrain import PretrainConfig
from megasnn.config.serialise import to_dict
from megasnn.files.described import in_message
from megasnn.losses import LOSSES

NORMALISATION = "normalisation"
"""Under which a checkpoint keeps the name of the constants that images were normalised by."""
Identity = dict[str, dict[str, object]]
"""What makes two models the same, as `identity` gives it."""


def identity(config: PretrainConfig) -> Identity:
    """What makes two models the same: dimensions, whatever the variant is called or how it is cut over ranks, and
    neuron, whatever its backend. What older checkpoints lack is left out where it has its default."""
    dimensions: Any = config.model
    model, neuron = to_dict(dimensions), to_dict(config.neuron)
    for entry in fields(dimensions):
        as_before = entry.metadata.get("added_later") and getattr(dimensions, entry.name) == entry.default
        if as_before or entry.metadata.get("same_function"):
            del model[entry.name]
    del neuron["neuron_backend"]
    return {"model": model, "neuron": neuron}


def changed_recipe(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """What a user is told of flags that differ from those of the run that saved, which is allowed.

    Args:
        saved: what the run kept beside its tensors. now: as `recipe` gives it.
    """
    before = saved.get("recipe")
    if not isinstance(before, Mapping):  # weights from elsewhere
        return []
    before = {"--optimizer": "adamw", **before}  # the only one, when it was not told yet
    changed = [
        f"{name} from {in_message(before.get(name))} to {value}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    return ["changed since the checkpoint was saved: " + ", ".join(changed)] if changed else []


def recipe(config: PretrainConfig) -> dict[str, object]:
    """Flags that define what is computed and that a run may change on its way."""
    training, optimizer = config.training, config.optimizer
    flags: dict[str, object] = {
        "--optimizer": optimizer.optimizer,
        "--freeze": optimizer.freeze,
        "--lr-scale-of": optimizer.lr_scale_of,
        "--weight-decay-of": optimizer.weight_decay_of,
        "--ema-decay": optimizer.ema_decay,
        "--loss": training.loss,
        "--label-smoothing": training.label_smoothing,
        **{flag(name): getattr(config.data, name) for name in ("augment", *CHANGES)},
        "--micro-batch-size": training.micro_batch_size,
        "--global-batch-size": training.global_batch_size,
        "--precision": training.precision,
        "--bptt-steps": training.bptt_steps,
    }
    return flags | {flag(name): getattr(training, name) for name in LOSSES[training.loss].flags}


def normalisation(config: PretrainConfig) -> str | None:
    """The name of the constants by which a run normalises images; None of other samples."""
    shape = config.model.input_shape
    return config.data.normalisation(shape[0], config.training.evaluate_only) if len(shape) == 3 else None


def samples_from(saved: Mapping[str, object], config: PretrainConfig) -> dict[str, object]:
    """Values of `DataConfig` by which samples become those that a checkpoint was trained on, where this configuration,
    of an evaluation or of --finetune, gives none and makes them otherwise.

    Args:
        saved: what the run kept beside its tensors. config: not yet with these values.
    """
    data, before = config.data, _flags_of(saved)
    cuts = data.split_by is not None or data.frame_duration is not None
    given = {
        "normalize_images": data.augment not in (DataConfig.augment, before.get("--augment")),
        **{"split_by": cuts, "frame_duration": cuts},
    }
    return {
        name: value
        for name, (value, _) in _other_samples(saved, config).items()
        if value is not None and getattr(data, name) is None and not given.get(name)
    }


def changed_samples(saved: Mapping[str, object], config: PretrainConfig) -> list[str]:
    """What a user is told where an evaluation or --finetune makes samples otherwise than the training that saved."""
    changed = [
        f"{flag(name)} from {in_message(value)} to {now}"
        for name, (value, now) in _other_samples(saved, config).items()
    ]
    told = "samples are made otherwise than those that the checkpoint was trained on: "
    return [told + ", ".join(changed)] if changed else []


def _other_samples(saved: Mapping[str, object], config: PretrainConfig) -> dict[str, tuple[object, object]]:
    """Fields of `DataConfig` that change what is evaluated, with what they were in training and are now, where that
    differs; with --finetune the constants alone. None where a checkpoint does not tell."""
    data, flags, frames = config.data, _flags_of(saved), saved.get("frames")
    if not isinstance(frames, Mapping):  # an Engine's, which has no samples; weights from elsewhere
        return {}
    found: dict[str, tuple[object, object]] = {}
    if (trained := _normalisation_of(saved, config)) is not None:
        found["normalize_images"] = trained, normalisation(config)
    if config.training.evaluate_only:
        found["center_crop"] = flags.get("--center-crop") or 1.0, data.center_crop or 1.0
        found["split_by"] = frames.get("split_by") or "number", data.split_by or "number"
        found["frame_duration"] = frames.get("frame_duration"), data.frame_duration
        found["normalize_frames"] = frames.get("normalize") or "none", data.normalize_frames or "none"
    return {name: (value, now) for name, (value, now) in found.items() if value != now}


def _normalisation_of(saved: Mapping[str, object], config: PretrainConfig) -> object:
    """By which constants a training normalised its images; None where that is not known. Checkpoints from before it was
    kept have the flags: the defaults, grey images, and the digits leave it open."""
    if NORMALISATION in saved:
        return saved[NORMALISATION]
    if config.model.input_shape[0] != 3 or normalisation(config) in (None, "digits"):
        return None
    flags = _flags_of(saved)
    asked, augment = flags.get("--normalize-images"), flags.get("--augment")
    if asked is None and augment in tuple(AUGMENTATIONS) and augment != DataConfig.augment:
        return AUGMENTATIONS[str(augment)].normalisation
    return asked


def _flags_of(saved: Mapping[str, object]) -> Mapping[str, object]:
    flags = saved.get("recipe")
    return flags if isinstance(flags, Mapping) else {}
