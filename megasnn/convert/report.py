"""What a source holds as text and as JSON, and how far two of them are apart, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megasnn.checkpoint.format import AVERAGE, BESIDE, OPTIMIZER, to_text
from megasnn.convert.source import Source

PIECE = 1 << 20  # elements compared at a time, in float64


def as_text(source: Source) -> str:
    """What it is, its tensors with type, size, shape and the files that they lie in, and totals."""
    told = source.metadata
    what = "checkpoint" if source.is_checkpoint else "state_dict"
    lines = [f"{source.path}: {what}" + (f" of the model {told.model}" if told.model else "")]
    if source.is_checkpoint:
        lines.append(f"iteration {told.iteration}, {told.consumed_samples} samples consumed")
        lines.append(f"written by {_pairs(told.versions)}; layout: {_pairs(told.layout or 'one process')}")
        lines += [f"{part}: {_pairs(values)}" for part, values in (told.config or {}).items()]
    width = max(map(len, source.tensors), default=0)
    for name, value in source.tensors.items():
        files = dict.fromkeys(box.file for box in told.tensors[name].boxes) if source.is_checkpoint else ()
        row = f"{name:<{width}}  {dtype_name(value):<8}  {size_text(value.nbytes):>10}  {list(value.shape)!s:<20}"
        lines.append(f"{row}  {', '.join(files)}".rstrip())
    of = {name: next(filter(name.startswith, BESIDE), "") for name in source.tensors}
    kind = f" of {told.optimizer}" if told.optimizer else ""
    for label, prefix in (("model", ""), ("average of the model", AVERAGE), (f"optimizer state{kind}", OPTIMIZER)):
        chosen = [value for name, value in source.tensors.items() if of[name] == prefix]
        elements, size = sum(value.numel() for value in chosen), sum(value.nbytes for value in chosen)
        lines.append(f"{label}: {len(chosen)} tensors, {elements:,} elements, {size_text(size)}")
    return "\n".join(lines)


def as_json(source: Source) -> dict[str, Any]:
    """All that metadata.json says, and of a file its tensors."""
    tensors = {name: {"shape": list(value.shape), "dtype": dtype_name(value)} for name, value in source.tensors.items()}
    said = json.loads(to_text(source.metadata)) if source.is_checkpoint else {"tensors": tensors}
    return {"path": str(source.path), **said}


def dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _pairs(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) if isinstance(values, dict) else f"{values}"


def size_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


@dataclass(frozen=True)
class Difference:
    """How far a tensor of two sources is apart.

    Attributes:
        name: of the tensor.
        absolute: largest difference of two elements; infinite where one side has a nan and the other a number.
        relative: that divided by the largest value of the tensor on either side.
        note: why it could not be compared, or how the types differ.
        is_comparable: it is on both sides, with one shape.
    """

    name: str
    absolute: float = 0.0
    relative: float = 0.0
    note: str = ""
    is_comparable: bool = True

    def exceeds(self, tolerance: float) -> bool:
        return not self.is_comparable or self.relative > tolerance


def differences(first: Source, second: Source, model_only: bool) -> Iterator[Difference]:
    """For each tensor of either source, in both under the same names; reads one of them at a time."""
    for name in sorted({*first.tensors, *second.tensors}):
        if not (model_only and name.startswith(BESIDE)):
            yield _difference(name, first, second)


def _difference(name: str, first: Source, second: Source) -> Difference:
    one, other = first.tensors.get(name), second.tensors.get(name)
    if one is None or other is None:
        return Difference(name, note=f"missing in {(first if one is None else second).path}", is_comparable=False)
    if one.shape != other.shape:
        return Difference(name, note=f"shapes {list(one.shape)} and {list(other.shape)}", is_comparable=False)
    absolute, largest = largest_difference(first.read(name), second.read(name))
    note = f"{dtype_name(one)} and {dtype_name(other)}" if one.dtype != other.dtype else ""
    return Difference(name, absolute, absolute / largest if absolute > 0 else 0.0, note)


def largest_difference(one: Tensor, other: Tensor) -> tuple[float, float]:
    """(largest difference of two elements, largest finite value on either side). Two nans are equal."""
    absolute = largest = 0.0
    for a, b in zip(one.flatten().split(PIECE), other.flatten().split(PIECE), strict=True):
        if not a.numel() or torch.equal(a, b):
            continue
        a, b = a.double(), b.double()
        same = (a == b) | (a.isnan() & b.isnan())
        gap = (a - b).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
        absolute = max(absolute, gap.max().item())
    for values in (one, other):
        if absolute > 0:
            largest = max(largest, values.double().abs().nan_to_num(0.0, 0.0, 0.0).max().item())
    return absolute, largest
