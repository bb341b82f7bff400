"""Calls of plain layers, which know of no ranks: inputs are gathered, outputs cut again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megasnn.layers.shape_inference import bounds_of, mark_spikes
from megasnn.parallel.collectives import gather_alike, own_channels
from megasnn.parallel_state import Group


@dataclass(frozen=True)
class PlainCall:
    """How to call a plain layer.

    Attributes:
        time_steps: T. A single time step is repeated T times.
        fold_time: all time steps are one batch, `[T * N, ...]`.
        dtype: floating-point inputs'; None for any.
        group: ranks that all compute the whole layer; None for a cut layer.
        cuts: for each input tensor, True if a rank has only its own channels; empty: all whole.
        is_last: the output stays whole, like logits.
    """

    time_steps: int = 1
    fold_time: bool = False
    dtype: torch.dtype | None = None
    group: Group | None = None
    cuts: Sequence[bool] = ()
    is_last: bool = False

    def prepare_input(self, x: Tensor, is_cut: bool) -> Tensor:
        if self.group is not None and is_cut:
            bounds = bounds_of(x)
            x = gather_alike(x, self.group)
            if bounds is not None:
                mark_spikes(x, bounds.largest, bounds.lowest)
        if self.dtype is not None and x.is_floating_point():
            x = x.to(self.dtype)
        if x.ndim < 3:
            return x
        if len(x) == 1 < self.time_steps:
            x = x.expand(self.time_steps, *x.shape[1:])
        return x.flatten(0, 1) if self.fold_time else x

    def restore_output(self, y: Tensor, frames: tuple[int, ...]) -> Tensor:
        """Output `[T, N, ...]` for the next layer. Args: frames: the inputs' T and N."""
        if self.fold_time:
            y = y.unflatten(0, frames)
        if self.group is None or self.is_last or y.ndim < 3 or y.shape[2] % self.group.size:
            return y
        return own_channels(y, self.group)
