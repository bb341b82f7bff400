"""A sample's arrays: shape, type and file of each input and the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class ArraySpec:
    """An array in every sample: a model input, or the target.

    Attributes:
        shape: for one sample.
        dtype: "float" for the model's compute type, "int" for int64.
        below: upper bound for integers from 0, checked in every batch; None for any integer.
        void: integer without a class, such as 255 in Cityscapes; ignored by loss and metrics.
        over_time: True if the first dimension is T.
        over_tokens: True if the last dimension is tokens, which --context-parallel-cut tokens divides over ranks. Loss
            and metrics then take a rank's own tokens, and their values are summed over these ranks.
        file: ending in shards, "npy", "mask.npy" or "seg.png". Default: the sample's image or class.
    """

    shape: tuple[int, ...]
    dtype: Literal["float", "int"] = "float"
    below: int | None = None
    over_time: bool = False
    file: str = ""
    void: int | None = None
    over_tokens: bool = False

    def type_for(self, floating: torch.dtype) -> torch.dtype:
        """`floating` for "float", int64 for "int"."""
        return floating if self.dtype == "float" else torch.int64

    def empty(self, samples: int, floating: torch.dtype) -> Tensor:
        """`[samples, *shape]` on the meta device."""
        return torch.empty((samples, *self.shape), dtype=self.type_for(floating), device="meta")

    def examples(self, samples: int, generator: torch.Generator) -> Tensor:
        """Random `[samples, *shape]`, to measure layers with."""
        shape = (samples, *self.shape)
        if self.dtype == "int":
            # Without a bound every integer is allowed, 0 and 1 among them.
            return torch.randint(self.below or 2, shape, generator=generator)
        return torch.randn(shape, generator=generator)

    def frames(self, samples: Tensor) -> Tensor:
        """Samples as layers take them: `[T, N, ...]`, or `[1, N, ...]` for an input shown at every time step.

        Args:
            samples: `[N, *shape]`; without `over_time` also `[T, N, *shape]`.
        Raises:
            ValueError: samples of another shape.
        """
        found = tuple(samples.shape)
        dims = len(self.shape)
        if self.over_time and found[1:] == self.shape:
            return samples.transpose(0, 1)
        if not self.over_time and len(found) == dims + 1:
            # One step stands for all: layers compute it once, and neurons repeat it.
            return samples.unsqueeze(0)
        if not self.over_time and len(found) == dims + 2:
            return samples
        sizes = ", ".join(map(str, ["N", *self.shape]))
        raise ValueError(f"expected samples [{sizes}]{'' if self.over_time else ' or [T, N, ...]'}, got {list(found)}")

    def problem(self, name: str, values: Any, samples: int | None, reads: bool) -> str | None:
        """Why values are no batch of this array; None if they are.

        Args:
            samples: expected number; None for any.
            reads: False checks that number only.
        """
        fits = isinstance(values, Tensor) and values.ndim > 0 and 0 < len(values) == (samples or len(values))
        # A rank that uses no values may be given tensors on the meta device.
        if fits and reads:
            is_float = values.is_floating_point()
            is_whole = not (is_float or values.is_complex() or values.dtype == torch.bool)
            fits = values.shape[1:] == self.shape and (is_whole if self.dtype == "int" else is_float)
        if not fits:
            kind = "whole numbers, of an integer type," if self.dtype == "int" else "floating-point values"
            shape = ", ".join(map(str, [samples or "N", *self.shape]))
            found = shape_and_type(values)
            return f"{name} must be {kind} [{shape}], one sample or more, as the model says; got {found}"
        if reads and self.void is not None:
            values = values[values != self.void]
        if reads and self.below is not None and values.numel():
            lowest = int(values.long().min())
            highest = int(values.long().max())
            if not 0 <= lowest <= highest < self.below:
                return (
                    f"{name} are from {lowest} to {highest}, and must be below {self.below} (num_classes, or `below`)"
                )
        return None


def not_finite(name: str, values: Tensor) -> str | None:
    """Why an input with nan or infinity is refused; None if all values are finite."""
    # A neuron would hide them: a comparison with nan is false, so it never fires.
    if values.is_floating_point() and not bool(values.isfinite().all()):
        return f"{name} hold values that are nan or infinite: no answer follows from them"
    return None


def shape_and_type(value: object) -> str:
    """For messages: a tensor's shape and type, or another object's class."""
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
