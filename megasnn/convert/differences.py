"""How far two sources of tensors are apart, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megasnn.checkpoint.description import BESIDE
from megasnn.convert.source import TensorSource
from megasnn.telemetry.log import byte_bar

PIECE = 1 << 20  # elements compared at a time, in float64


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


def differences(first: TensorSource, second: TensorSource, model_only: bool) -> Iterator[Difference]:
    """For each tensor of either source, in both under the same names; reads one of them at a time."""
    either = {**second.tensors, **first.tensors}
    infos = {name: either[name] for name in sorted(either) if not (model_only and name.startswith(BESIDE))}
    with byte_bar("comparing", sum(info.bytes for info in infos.values())) as bar:
        for name, info in infos.items():
            yield _difference(name, first, second)
            bar.update(info.bytes)


def _difference(name: str, first: TensorSource, second: TensorSource) -> Difference:
    infos = first.tensors.get(name), second.tensors.get(name)
    one, other = infos
    if one is None or other is None:
        return Difference(name, note=f"missing in {(first if one is None else second).path}", is_comparable=False)
    if one.shape != other.shape:
        return Difference(name, note=f"shapes {list(one.shape)} and {list(other.shape)}", is_comparable=False)
    absolute, largest = largest_difference(first.read(name), second.read(name))
    note = f"{one.dtype_name} and {other.dtype_name}" if one.dtype != other.dtype else ""
    return Difference(name, absolute, absolute / largest if absolute > 0 else 0.0, note)


def largest_difference(one: Tensor, other: Tensor) -> tuple[float, float]:
    """(largest difference of two elements, largest finite value on either side). Two nans are equal."""
    absolute = largest = 0.0
    for a, b in zip(one.flatten().split(PIECE), other.flatten().split(PIECE), strict=True):
        if torch.equal(a, b):
            gap = torch.zeros(1)
        else:
            a, b = a.double(), b.double()
            same = (a == b) | (a.isnan() & b.isnan())
            gap = (a - b).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
        absolute = max(absolute, gap.max().item() if gap.numel() else 0.0)
        for values in (a, b):
            largest = max(largest, values.double().abs().nan_to_num(0.0, 0.0).max().item() if values.numel() else 0.0)
    return absolute, largest
