"""Exponential moving average of the weights, for evaluation and export."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megasnn.checkpoint.format import AVERAGE
from megasnn.parallel.sharding import ShardedTensor


class WeightAverage:
    """average = decay * average + (1 - decay) * tensor after each step, from the initial tensors on.

    Running statistics are averaged too, as in timm's `ModelEma`; integer tensors are copied.
    """

    def __init__(self, tensors: Sequence[ShardedTensor], decay: float) -> None:
        self._decay = decay
        self.steps = 0
        self.tensors: list[ShardedTensor] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for entry in tensors:
            current = entry.tensor.detach()
            average = current.clone()
            self._pairs.append((average, current))
            self.tensors.append(ShardedTensor(f"{AVERAGE}{entry.name}", average, entry.shard, is_parameter=False))

    @torch.no_grad()
    def update(self) -> None:
        """On a GPU this launches at most two kernels."""
        # As in TensorFlow's ExponentialMovingAverage with `num_updates`.
        # Without the warm-up a short run would keep its initial values: 0.9999 ** 78 is 0.992.
        decay = min(self._decay, (1 + self.steps) / (10 + self.steps))
        self.steps += 1
        averages: list[Tensor] = []
        tensors: list[Tensor] = []
        copies: list[Tensor] = []
        originals: list[Tensor] = []
        for average, current in self._pairs:
            if average.is_floating_point():
                averages.append(average)
                tensors.append(current)
            else:
                copies.append(average)
                originals.append(current)
        if averages:
            torch._foreach_lerp_(averages, tensors, 1 - decay)
        if copies:
            torch._foreach_copy_(copies, originals)

    @torch.no_grad()
    def restart(self) -> None:
        self.steps = 0
        for average, current in self._pairs:
            average.copy_(current)

    @torch.no_grad()
    def exchange(self) -> None:
        """Swaps the tensors and their average. A second call swaps back."""
        # One tensor at a time: both sets stay in place, and no third one is in memory.
        for average, current in self._pairs:
            before = current.clone()
            current.copy_(average)
            average.copy_(before)
