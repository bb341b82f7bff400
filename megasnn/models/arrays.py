"""Arrays of a sample: the shape, type and file of an input of a model, or of its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class ArraySpec:
    """Array that every sample has: an input of the model, or its target.

    Attributes:
        shape: of one sample.
        dtype: "float" for the type that the model computes in, "int" for whole numbers (int64).
        below: whole numbers are from 0 to below - 1, as every batch is checked for; None: they may be any.
        void: a number beside them that stands for no class, as 255 in Cityscapes. Loss and metrics leave it out.
        over_time: True where the first dimension of an input is T, so that each time step has its own part.
        file: ending of its file in shards, "npy", "mask.npy" or "seg.png"; without one, an input is the image of the
            sample, and a target its class.
    """

    shape: tuple[int, ...]
    dtype: Literal["float", "int"] = "float"
    below: int | None = None
    over_time: bool = False
    file: str = ""
    void: int | None = None

    def type_for(self, floating: torch.dtype) -> torch.dtype:
        """Type of the values in a model that computes in the type `floating`."""
        return floating if self.dtype == "float" else torch.int64

    def empty(self, samples: int, floating: torch.dtype) -> Tensor:
        """Samples on the meta device."""
        return torch.empty((samples, *self.shape), dtype=self.type_for(floating), device="meta")

    def examples(self, samples: int, generator: torch.Generator) -> Tensor:
        """Random samples that layers are measured on."""
        shape = (samples, *self.shape)
        if self.dtype == "int":
            return torch.randint(self.below or 2, shape, generator=generator)
        return torch.randn(shape, generator=generator)

    def frames(self, samples: Tensor) -> Tensor:
        """Samples as layers take them: `[T, N, ...]`, or `[1, N, ...]` of an input that all time steps see.

        Args:
            samples: `[N, *shape]`; where all time steps see the same, also `[T, N, *shape]`.
        Raises:
            ValueError: samples of another shape.
        """
        found, dims = tuple(samples.shape), len(self.shape)
        if self.over_time and found[1:] == self.shape:
            return samples.transpose(0, 1)
        if not self.over_time and len(found) in (dims + 1, dims + 2):
            return samples.unsqueeze(0) if len(found) == dims + 1 else samples
        sizes = ", ".join(map(str, ["N", *self.shape]))
        raise ValueError(f"expected samples [{sizes}]{'' if self.over_time else ' or [T, N, ...]'}, got {list(found)}")

    def problem(self, name: str, values: Any, samples: int | None, reads: bool) -> str | None:
        """Reason why values are no batch of these arrays; None where they are.

        Args:
            samples: number of them; None for any. reads: False looks at that number alone.
        """
        fits = isinstance(values, Tensor) and values.ndim > 0 and 0 < len(values) == (samples or len(values))
        if fits and reads:
            is_whole = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
            fits = values.shape[1:] == self.shape and (is_whole if self.dtype == "int" else values.is_floating_point())
        if not fits:
            kind = "whole numbers, of an integer type," if self.dtype == "int" else "floating-point values"
            shape = ", ".join(map(str, [samples or "N", *self.shape]))
            got = shape_and_type(values)
            return f"{name} must be {kind} [{shape}], one sample or more, as the model says; got {got}"
        if reads and self.void is not None:
            values = values[values != self.void]
        if reads and self.below is not None and values.numel():
            lowest, highest = int(values.long().min()), int(values.long().max())
            if not 0 <= lowest <= highest < self.below:
                return (
                    f"{name} are from {lowest} to {highest}, and must be below {self.below} (num_classes, or `below`)"
                )
        return None


def not_finite(name: str, values: Tensor) -> str | None:
    """Reason why no answer follows from an input; None where all values are finite. A neuron would hide a nan."""
    if values.is_floating_point() and not bool(values.isfinite().all()):
        return f"{name} hold values that are nan or infinite: no answer follows from them"
    return None


def shape_and_type(value: object) -> str:
    """Text for a message: shape and type of a tensor, or the class of anything else."""
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
