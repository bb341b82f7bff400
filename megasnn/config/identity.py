"""What a checkpoint keeps of a configuration: what makes two models the same, and what a run may change on its way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megasnn.config.checks import flag
from megasnn.config.data import CHANGES
from megasnn.config.pretrain import PretrainConfig
from megasnn.config.serialise import to_dict
from megasnn.files.described import in_message
from megasnn.losses import LOSSES

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
