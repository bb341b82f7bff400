"""Sums of a training step over all ranks: one exchange, and one read of the device by the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megasnn.parallel.collectives import all_reduce_sum
from megasnn.parallel_state import Group


@dataclass(frozen=True)
class StepSums:
    """Sums of a step over all ranks, on the device: the host has not waited for them.

    Attributes:
        values: float64 vector of all sums. slices: the part of it for each name.
        norm: of the gradient. is_void: True where the step must change nothing.
    """

    values: Tensor
    slices: Mapping[str, slice]
    norm: Tensor
    is_void: Tensor

    @classmethod
    def over_ranks(cls, parts: Mapping[str, Tensor], largest: float, world: Group) -> StepSums:
        """Sums this rank's parts over all ranks, in one all-reduce. Collective.

        Args:
            parts: float64 vectors by name: `loss`, `overflows` (numbers too large for their type) and `squares` (of the
                gradient, as `GradientNorm` gives them), which decide whether the step counts, and any others.
            largest: number of the weights' type; optimizers keep the squares in it.
        """
        slices = {}
        end = 0
        for name, part in parts.items():
            slices[name] = slice(end, end + len(part))
            end += len(part)
        values = all_reduce_sum(torch.cat([*parts.values()]), world)
        squares = values[slices["squares"]].sum()
        loss = values[slices["loss"].start]
        # A finding on any rank makes the step void, too: its values are not those of the model.
        is_void = (values[slices["findings"].start] != 0) | (values[slices["overflows"].start] != 0)
        is_void = is_void | ~(loss.isfinite() & (squares <= largest))
        return cls(values, slices, squares.sqrt(), is_void)

    def read(self) -> StepFigures:
        """Reads all sums: the one place in a step where the host waits for the device."""
        is_void, *numbers = torch.cat([self.is_void.to(self.values.dtype).reshape(1), self.values]).tolist()
        values = {name: numbers[part] for name, part in self.slices.items()}
        (loss,) = values["loss"]
        grad_norm = math.sqrt(math.fsum(values["squares"]))
        return StepFigures(loss, grad_norm, not is_void, values)


@dataclass(frozen=True)
class StepFigures:
    """Sums of a step on the host, the same on every rank.

    Attributes:
        loss: mean over the samples of the global batch.
        grad_norm: over all parameters.
        is_finite: False where nothing may change.
        values: all numbers by name.
    """

    loss: float
    grad_norm: float
    is_finite: bool
    values: Mapping[str, Sequence[float]]
