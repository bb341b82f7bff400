"""A running average of the weights (exponential moving average), to be evaluated and exported in their place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megasnn.checkpoint.format import AVERAGE
from megasnn.parallel.sharding import ShardedTensor


class WeightAverage:
    """The running average of a model's tensors: after each step, average = decay * average + (1 - decay) * tensor.

    Running statistics of norms are averaged like weights, as timm's `ModelEma` does; what is not floating-point is
    copied. Each rank averages what it holds, so the average is the same on every layout.

    Args:
        tensors: parameters and buffers of this rank. The average begins with their values.

    Attributes:
        tensors: the average as it is saved, under names of its own.
    """

    def __init__(self, tensors: Sequence[ShardedTensor], decay: float) -> None:
        self._decay = decay
        self._current = [entry.tensor.detach() for entry in tensors]
        self._averages = [current.clone() for current in self._current]
        self.tensors = [
            ShardedTensor(f"{AVERAGE}{entry.name}", average, entry.shard, is_parameter=False)
            for entry, average in zip(tensors, self._averages, strict=True)
        ]

    @torch.no_grad()
    def update(self) -> None:
        """After each step."""
        for averaged in (True, False):
            pairs = zip(self._averages, self._current, strict=True)
            chosen = [pair for pair in pairs if pair[0].is_floating_point() == averaged]
            if chosen:
                averages, current = map(list, zip(*chosen, strict=True))
                if averaged:
                    torch._foreach_lerp_(averages, current, 1 - self._decay)
                else:
                    torch._foreach_copy_(averages, current)

    @torch.no_grad()
    def restart(self) -> None:
        """Begins again, with the values that the tensors have now."""
        for average, current in zip(self._averages, self._current, strict=True):
            average.copy_(current)

    @torch.no_grad()
    def exchange(self) -> None:
        """Gives the tensors the values of the average, and the average theirs; a second time takes it back."""
        for average, current in zip(self._averages, self._current, strict=True):
            held = current.clone()
            current.copy_(average)
            average.copy_(held)
