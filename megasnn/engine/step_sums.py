"""Sums over all ranks that a step needs, in one all-reduce."""

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
    """A step's sums over all ranks, on the device.

    Attributes:
        values: float64, by name in `slices`.
        must_skip: true for a step to skip, which must change nothing.
    """

    values: Tensor
    slices: Mapping[str, slice]
    norm: Tensor
    must_skip: Tensor

    @classmethod
    def over_ranks(cls, parts: Mapping[str, Tensor], largest: float, world: Group) -> StepSums:
        """Sums this rank's parts in one all-reduce. Collective.

        Args:
            parts: float64 vectors by name. `loss`, `findings`, `overflows` (statistics too large for their type) and
                `squares` (from `GradientNorm`) decide whether the step must be skipped.
            largest: largest number in the weights' type, in which optimizers store squares.
        """
        slices = {}
        end = 0
        for name, part in parts.items():
            slices[name] = slice(end, end + len(part))
            end += len(part)
        # One message: what a step agrees on is a few numbers, and each message costs a latency.
        values = all_reduce_sum(torch.cat([*parts.values()]), world)
        squares = values[slices["squares"]].sum()
        loss = values[slices["loss"].start]
        # With a finding on any rank, values are not the model's. The norm of nan or of an overflow fails `<=`, too.
        must_skip = (values[slices["findings"].start] != 0) | (values[slices["overflows"].start] != 0)
        must_skip = must_skip | ~(loss.isfinite() & (squares <= largest))
        return cls(values, slices, squares.sqrt(), must_skip)

    def read(self) -> StepFigures:
        # The host waits for the device only here in a step, and for one copy of all values.
        must_skip, *numbers = torch.cat([self.must_skip.to(self.values.dtype).reshape(1), self.values]).tolist()
        values = {name: numbers[part] for name, part in self.slices.items()}
        (loss,) = values["loss"]
        # Rounded once, so that the reported norm does not depend on the order of the parameters.
        grad_norm = math.sqrt(math.fsum(values["squares"]))
        return StepFigures(loss, grad_norm, not must_skip, values)


@dataclass(frozen=True)
class StepFigures:
    """A step's sums on the host, the same on every rank.

    Attributes:
        loss: mean over the global batch.
    """

    loss: float
    grad_norm: float
    is_finite: bool
    values: Mapping[str, Sequence[float]]
