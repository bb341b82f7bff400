"""Does a checkpoint fit this run? Lists of differences, empty when it does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from megasnn.checkpoint.description import Metadata, TensorFacts
from megasnn.files.described import in_message
from megasnn.precisions import PRECISIONS
from megasnn.sharded_tensors import ShardedTensor

Narrower: TypeAlias = dict[tuple[str, str], list[str]]
"""Tensors whose saved values the type that they have here cannot hold, by both types."""


def other_model(saved: str | None, now: str) -> str:
    """The message for a checkpoint of another model."""
    return f"it is a checkpoint of the model {saved}, and this run trains {now}"


def model_differences(
    metadata: Metadata,
    model: str | None,
    config: Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer | None,
) -> Iterator[str]:
    """Where the saved model, its configuration and the kind of optimizer are not those of this run."""
    if model is not None and metadata.model not in (None, model):
        yield other_model(metadata.model, model)
        return
    if config is not None and metadata.config is None:
        yield "it holds weights without a model configuration; load it with --finetune"
    elif config is not None and metadata.config is not None:
        yield from config_differences(metadata.config, config)
    if optimizer is None:
        return
    if metadata.optimizer is None:
        yield "it holds no optimizer state; load it with --finetune or --no-load-optim"
    elif metadata.optimizer != type(optimizer).__name__:
        yield (
            f"its optimizer state is of {in_message(metadata.optimizer)}, this run uses {type(optimizer).__name__}; "
            "load it with --no-load-optim"
        )


def config_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """One line for each field whose value differs, with both values; nested fields as `neuron.tau`."""
    before, after = _flat(saved), _flat(json.loads(json.dumps(now)))
    for field in sorted(before.keys() | after.keys()):
        if field not in before or field not in after or before[field] != after[field]:
            yield f"{in_message(field)}: saved {_shown(before, field)}, now {_shown(after, field)}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _shown(values: Mapping[str, Any], field: str) -> str:
    return in_message(repr(values[field])) if field in values else "absent"


def tensor_differences(
    saved: Mapping[str, TensorFacts], entries: Iterable[ShardedTensor]
) -> tuple[list[str], list[str], Narrower]:
    """The names this rank takes, and what is wrong with them: not saved or another shape, a line each; digits to be
    lost."""
    names, problems, narrower = list[str](), list[str](), Narrower()
    for entry in entries:
        names.append(entry.name)
        told = saved.get(entry.name)
        if told is None:
            problems.append(f"{entry.name}: not in the checkpoint")
        elif told.shape != entry.shard.global_shape:
            problems.append(f"{entry.name}: saved with shape {list(told.shape)}, now {list(entry.shard.global_shape)}")
        elif not _keeps_values(getattr(torch, told.dtype), entry.tensor.dtype):
            now = str(entry.tensor.dtype).removeprefix("torch.")
            narrower.setdefault((told.dtype, now), []).append(entry.name)
    return names, problems, narrower


def type_problems(ranks: Iterable[Narrower]) -> Iterator[str]:
    """A line for each pair of types: what the tensors are saved as, and what cannot hold it. Of all ranks."""
    names: dict[tuple[str, str], set[str]] = {}
    for narrower in ranks:
        for types, mine in narrower.items():
            names.setdefault(types, set()).update(mine)
    for (saved, now), those in names.items():
        first, others = min(those), len(those) - 1
        them = f"{first} and {others} other tensor{'s' * (others > 1)}" if others else first
        able = [name for name, precision in PRECISIONS.items() if precision.weights == saved]
        advice = f"; load it with --precision {' or '.join(able)}" if able else ""
        yield f"{them}: saved as {saved}, {now} cannot hold {'them' if others else 'it'}{advice}"


def marks(names: Iterable[str], saved: Iterable[str]) -> int:
    """A bit for each saved tensor, whether it is among the names: what thousands of ranks can tell each other."""
    there = set(names)
    return sum(1 << number for number, name in enumerate(saved) if name in there)


def marked(bits: int, saved: Iterable[str]) -> set[str]:
    """The saved tensors of which `marks` has set the bit."""
    return {name for number, name in enumerate(saved) if bits >> number & 1}


def unused_tensors(saved: Iterable[str], taken: Iterable[str], left: tuple[str, ...]) -> Iterator[str]:
    """Saved tensors that no rank takes, but for those whose names begin like one of `left`: left aside on purpose."""
    for name in set(saved) - set(taken):
        if not name.startswith(left):
            yield f"{name}: saved, but nothing here takes it"


def _keeps_values(source: torch.dtype, target: torch.dtype) -> bool:
    """True when every value of one type is a value of the other, so that a conversion is exact."""
    if source.is_floating_point != target.is_floating_point:
        return False
    try:
        return torch.promote_types(source, target) == target
    except RuntimeError:  # torch promotes neither float8 nor the larger unsigned types
        return False
