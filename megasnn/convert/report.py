"""Content of a source as text, and the distance between two of them, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasnn.checkpoint.format import AVERAGE, BESIDE, OPTIMIZER
from megasnn.checkpoint.tensor_io import dtype_name
from megasnn.convert.source import Source


def as_text(source: Source) -> str:
    """Progress, tensors with type, size, shape and the files that they lie in, and totals."""
    metadata = source.metadata
    what = "checkpoint" if source.is_checkpoint else "state_dict"
    lines = [f"{source.path}: {what}" + (f" of the model {metadata.model}" if metadata.model else "")]
    if source.is_checkpoint:
        lines.append(f"iteration {metadata.iteration}, {metadata.consumed_samples} samples consumed")
        lines.append(f"written by {_pairs(metadata.versions)}; layout: {_pairs(metadata.layout or {'ranks': 1})}")
        lines += [f"{part}: {_pairs(values)}" for part, values in (metadata.config or {}).items()]
    width = max(map(len, source.tensors), default=0)
    for name, value in source.tensors.items():
        files = dict.fromkeys(box.file for box in metadata.tensors[name].boxes) if source.is_checkpoint else ()
        row = f"{name:<{width}}  {dtype_name(value):<8}  {size_text(value.nbytes):>10}  {list(value.shape)!s:<20}"
        lines.append(f"{row}  {', '.join(files)}".rstrip())
    for label, prefix in (("model", ""), ("average of the model", AVERAGE), ("optimizer state", OPTIMIZER)):
        chosen = [value for name, value in source.tensors.items() if _beginning(name) == prefix]
        elements, size = sum(value.numel() for value in chosen), sum(value.nbytes for value in chosen)
        kind = f" of {metadata.optimizer}" if prefix == OPTIMIZER and metadata.optimizer else ""
        lines.append(f"{label}{kind}: {len(chosen)} tensors, {elements:,} elements, {size_text(size)}")
    return "\n".join(lines)


def _beginning(name: str) -> str:
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
    """Largest difference of two elements of a tensor in two sources: infinite where they cannot be compared, for which
    `note` says why."""

    name: str
    largest: float
    note: str


def differences(first: Source, second: Source, model_only: bool) -> Iterator[Difference]:
    """Compares every tensor of either source, in both under the same names."""
    for name in sorted({*first.tensors, *second.tensors}):
        if model_only and _beginning(name):
            continue
        one, other = first.tensors.get(name), second.tensors.get(name)
        if one is None or other is None:
            yield Difference(name, math.inf, f"missing in {(first if one is None else second).path}")
        elif one.shape != other.shape:
            yield Difference(name, math.inf, f"shapes {list(one.shape)} and {list(other.shape)}")
        else:
            note = f"{dtype_name(one)} and {dtype_name(other)}" if one.dtype != other.dtype else ""
            yield Difference(name, largest_difference(one, other), note)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Largest difference of two elements. Two nans are equal; the difference of a nan and a number is infinite."""
    if not one.numel():
        return 0.0
    a, b = one.double(), other.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return gap.max().item()
