from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from megasnn.checkpoint.folder import require_empty
from megasnn.checkpoint.format import AVERAGE, BESIDE, OPTIMIZER, averages_of, own_names
from megasnn.checkpoint.save import save_global_tensors
from megasnn.checkpoint.source import Source, derived, in_our_names
from megasnn.checkpoint.tensor_io import dtype_name
from megasnn.common.files import CheckpointError, quantity, sync
from megasnn.models.registry import all_dialects, dialect_for, dialect_of, model_of
from megasnn.models.weight_names import renamed

if TYPE_CHECKING:
    Names = str
else:
    # The command line lists these values.
    Names = Literal[(*dict.fromkeys(dialect.name for dialect in all_dialects()), "megasnn")]
"""Program whose tensor names are used: one known to some model of the registry, or ours."""


def weights_as(source: Source, names: Names, averaged: bool = False) -> Source:
    """The model's tensors, without optimizer state, under another program's names.

    Args:
        averaged: take the weights' moving average.
    Raises:
        CheckpointError: the program has no such model, tensors are missing or unexpected, or there is no average.
    """
    ours = in_our_names(source)
    if averaged:
        averages = averages_of(ours.tensors)
        if not averages:
            raise CheckpointError(f"{ours.path} holds no average of the weights: the run had no --ema-decay")
        ours = replace(ours, tensors=averages)
    weights = own_names(ours.tensors)
    if names == "megasnn":
        return derived(ours, renamed({name: name for name in weights}))
    return derived(ours, dialect_for(names, weights, ours.metadata.model).from_ours(weights, ours.dimensions))


def export_weights(source: Source, output: Path, names: Names, averaged: bool = False) -> Source:
    """Writes the model's tensors, or their averages, to a new file, and returns them.

    Args:
        output: the ending .safetensors selects that format, any other torch.save.
    Raises:
        CheckpointError: as `weights_as`; or the file exists already.
    """
    weights = weights_as(source, names, averaged)
    if output.exists():
        raise CheckpointError(f"{output} exists already; remove it or give another --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    # Written aside, synced and renamed: no other program sees half a file.
    aside = output.with_name(f"{output.name}.tmp")
    # safetensors refuses tensors that share memory, and torch.save would write all the memory behind a view.
    tensors = {name: value.clone() for name, value in weights.tensors.items()}
    try:
        if output.suffix == ".safetensors":
            save_file(tensors, aside, {"format": "pt"})
        else:
            torch.save(tensors, aside)
        sync(aside)
        os.rename(aside, output)
        sync(output.parent)
    finally:
        aside.unlink(missing_ok=True)
    return weights


def import_weights(source: Source, save: Path) -> tuple[Path, str]:
    """Writes weights as a checkpoint at iteration 0 without optimizer state and configuration, for --finetune.

    Returns:
        the checkpoint, and the program whose names the weights had.
    Raises:
        CheckpointError: model or program are unknown, or `save` holds checkpoints already.
    """
    # First of all: the file's values are read only on use.
    require_empty(save)
    title = "MegaSNN" if model_of(None, source.tensors) else dialect_of(source.tensors).title
    weights = weights_as(source, "megasnn")
    model = model_of(source.metadata.model, weights.tensors)
    name = None if model is None else model.name
    return save_global_tensors(save, weights.tensors, model=name, extra={"source": source.path.name}), title


def as_text(source: Source) -> str:
    metadata = source.metadata
    title = "checkpoint" if source.is_checkpoint else "state_dict"
    if metadata.model:
        title = f"{title} of the model {metadata.model}"
    lines = [f"{source.path}: {title}", *source.notices]
    if source.is_checkpoint:
        lines.append(f"iteration {metadata.iteration}, {quantity(metadata.consumed_samples, 'sample')} consumed")
        lines.append(f"written by {_pairs(metadata.versions)}; layout: {_pairs(metadata.layout or {'ranks': 1})}")
        lines += [f"{part}: {_pairs(values)}" for part, values in (metadata.config or {}).items()]
    width = max(map(len, source.tensors), default=0)
    for name, value in source.tensors.items():
        files = ""
        if source.is_checkpoint:
            files = ", ".join(dict.fromkeys(box.file for box in metadata.tensors[name].boxes))
        row = f"{name:<{width}}  {dtype_name(value):<8}  {size_text(value.nbytes):>10}  {list(value.shape)!s:<20}"
        lines.append(f"{row}  {files}".rstrip())
    for label, prefix in (("model", ""), ("average of the model", AVERAGE), ("optimizer state", OPTIMIZER)):
        chosen = [value for name, value in source.tensors.items() if _prefix(name) == prefix]
        elements = sum(value.numel() for value in chosen)
        size = sum(value.nbytes for value in chosen)
        kind = f" of {metadata.optimizer}" if prefix == OPTIMIZER and metadata.optimizer else ""
        lines.append(f"{label}{kind}: {quantity(len(chosen), 'tensor')}, {elements:,} elements, {size_text(size)}")
    return "\n".join(lines)


def _prefix(name: str) -> str:
    return next(filter(name.startswith, BESIDE), "")


def _pairs(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) if isinstance(values, dict) else f"{values}"


def size_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


class Difference(NamedTuple):
    """Largest difference between elements; infinite if tensors cannot be compared, and `note` says why."""

    name: str
    largest: float
    note: str


def tensor_differences(first: Source, second: Source, model_only: bool) -> Iterator[Difference]:
    for name in sorted({*first.tensors, *second.tensors}):
        if model_only and _prefix(name):
            continue
        one = first.tensors.get(name)
        other = second.tensors.get(name)
        if one is None:
            yield Difference(name, math.inf, f"missing in {first.path}")
        elif other is None:
            yield Difference(name, math.inf, f"missing in {second.path}")
        elif one.shape != other.shape:
            yield Difference(name, math.inf, f"shapes {list(one.shape)} and {list(other.shape)}")
        else:
            note = f"{dtype_name(one)} and {dtype_name(other)}" if one.dtype != other.dtype else ""
            yield Difference(name, largest_difference(one, other), note)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Two nans are equal; a nan and a number differ infinitely."""
    if not one.numel():
        return 0.0
    a = one.double()
    b = other.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return gap.max().item()
