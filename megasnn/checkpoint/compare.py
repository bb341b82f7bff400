"""Differences between what a checkpoint is of and what a run needs; none where it fits."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from megasnn.checkpoint.format import Metadata


def other_model(saved: str | None, now: str) -> str:
    """The message for a checkpoint of another model."""
    return f"it is a checkpoint of the model {saved}, and this run trains {now}"


def model_differences(metadata: Metadata, model: str | None, config: Mapping[str, Any] | None) -> Iterator[str]:
    """Where the saved model or its configuration are not those of this run.

    Args:
        model: its name; None accepts any.
        config: what defines it; None accepts any model whose tensors fit (--finetune).
    """
    if model is not None and metadata.model not in (None, model):
        yield other_model(metadata.model, model)
    elif config is not None and metadata.config is None:
        yield "it holds weights without a model configuration; load it with --finetune"
    elif config is not None and metadata.config is not None:
        yield from config_differences(metadata.config, config)


def optimizer_difference(metadata: Metadata, optimizer: str | None) -> Iterator[str]:
    """Why this optimizer, by its class name, cannot take the saved state; nothing without an optimizer."""
    if optimizer is None or metadata.optimizer == optimizer:
        return
    if metadata.optimizer is None:
        yield "it holds no optimizer state; load it with --finetune or --no-load-optim"
    else:
        yield f"its optimizer state is of {metadata.optimizer}, this run uses {optimizer}; load it with --no-load-optim"


def config_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """One line for each field whose value differs, with both values; nested fields as `neuron.tau`."""
    before, after = _flat(saved), _flat(json.loads(json.dumps(now)))
    for field in sorted(before.keys() | after.keys()):
        if field not in before or field not in after or before[field] != after[field]:
            yield f"{field}: saved {_shown(before, field)}, now {_shown(after, field)}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _shown(values: Mapping[str, Any], field: str) -> str:
    return reprlib.repr(values[field]) if field in values else "absent"
