"""Way in which a layer without knowledge of ranks is called: with its inputs gathered, and its output cut again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megasnn.layers.shape_inference import mark_spikes, max_of
from megasnn.parallel.collectives import gather_alike, own_channels
from megasnn.parallel_state import Group


@dataclass(frozen=True)
class LayerCall:
    """Way in which a layer is called that knows nothing of ranks, or is whole on every one.

    Attributes:
        time_steps: that an input of a single one stands for.
        fold_time: whether it is given all time steps as one batch.
        dtype: of its input; None for what comes.
        group: the tensor parallel ranks that all compute the whole layer: its input is gathered, and a rank keeps its
            channels of the output, where they divide; None for a layer that is cut.
        cuts: whether ranks have their channels of each of the inputs' tensors; without them all are whole.
        is_last: whether the output stays whole, as logits are.
    """

    time_steps: int = 1
    fold_time: bool = False
    dtype: torch.dtype | None = None
    group: Group | None = None
    cuts: Sequence[bool] = ()
    is_last: bool = False

    def prepare_input(self, x: Tensor, is_cut: bool) -> Tensor:
        if self.group is not None and is_cut:
            largest, x = max_of(x), gather_alike(x, self.group)
            x = x if largest is None else mark_spikes(x, largest)
        x = x.to(self.dtype) if self.dtype is not None and x.is_floating_point() else x
        if x.ndim < 3:
            return x
        if len(x) == 1 < self.time_steps:
            x = x.expand(self.time_steps, *x.shape[1:])
        return x.flatten(0, 1) if self.fold_time else x

    def restore_output(self, y: Tensor, frames: tuple[int, ...]) -> Tensor:
        """Output of the layer, of so many time steps and samples."""
        y = y.unflatten(0, frames) if self.fold_time else y
        if self.group is None or self.is_last or y.ndim < 3 or y.shape[2] % self.group.size:
            return y
        return own_channels(y, self.group)
