"""Parts of a configuration that a checkpoint keeps: the identity of the model, and flags that a run may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from megasnn.config.checks import flag
from megasnn.config.data import CHANGES
from megasnn.config.pretrain import PretrainConfig
from megasnn.config.values import to_dict
from megasnn.files import in_message
from megasnn.optimizers import DECAY_STYLES

SAMPLES = "samples"
"""Under which a checkpoint keeps how samples were made."""
Identity = dict[str, dict[str, object]]
"""Dimensions and neuron of a model, as `identity` gives them."""
_UPDATE = {
    "training": (
        *("micro_batch_size", "global_batch_size", "bptt_steps", "seed", "precision", "loss", "label_smoothing"),
    ),
    "data": ("augment", *CHANGES, "shuffle", "last_batch"),
}


def identity(config: PretrainConfig) -> Identity:
    """Dimensions, and neuron, whatever its backend."""
    model, neuron = to_dict(config.model), to_dict(config.neuron)
    del neuron["neuron_backend"]
    return {"model": model, "neuron": neuron}


def recipe(config: PretrainConfig) -> dict[str, object]:
    """Flags that change the update, and that a run may change on its way."""
    names = {"optimizer": tuple(each.name for each in fields(config.optimizer)), **_UPDATE}
    if DECAY_STYLES[config.optimizer.lr_decay_style](1.0) < 1.0:  # the rate follows from the length
        names["training"] += "train_iters", "train_epochs"
    if "loss" in config.model.own_task():
        names["training"] = tuple(name for name in names["training"] if name not in ("loss", "label_smoothing"))
    return {flag(name): getattr(getattr(config, part), name) for part, of_part in names.items() for name in of_part}


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


def samples(config: PretrainConfig) -> dict[str, object]:
    """Values by which samples are made where nothing is drawn; a checkpoint keeps them as `SAMPLES`."""
    data, shape = config.data, config.model.input_shape
    if len(shape) != 3:
        return {"split_by": data.split_by or "number"}
    constants = data.normalisation(shape[0], config.training.evaluate_only)
    return {"normalize_images": constants, "center_crop": data.center_crop}


def samples_from(saved: Mapping[str, object], evaluates: bool) -> dict[str, object]:
    """Those of a checkpoint's values of `samples` that count in an evaluation, or with --finetune, the constants alone.

    Args:
        saved: kept by the run beside its tensors.
    """
    found, counts = saved.get(SAMPLES), ("normalize_images", *("center_crop", "split_by") * evaluates)
    return {name: found[name] for name in counts if name in found} if isinstance(found, Mapping) else {}


def changed_samples(saved: Mapping[str, object], config: PretrainConfig) -> list[str]:
    """One line for a user where an evaluation or --finetune makes samples otherwise than the training that saved."""
    before, now = samples_from(saved, config.training.evaluate_only), samples(config)
    changed = {flag(name): (value, now.get(name)) for name, value in before.items() if value != now.get(name)}
    return _line("samples are made otherwise than those that the checkpoint was trained on: ", changed)
