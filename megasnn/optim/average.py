"""Exponential moving average of the weights, to be evaluated and exported in their place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megasnn.checkpoint.format import AVERAGE
from megasnn.parallel.sharding import ShardedTensor


class WeightAverage:
    """Average of a model's tensors: after each step, average = decay * average + (1 - decay) * tensor.

    The decay warms up: after n steps it is at most (1 + n) / (10 + n), as TensorFlow's ExponentialMovingAverage has it
    with `num_updates`. Otherwise a short run would be mostly its initial values: 0.9999 ** 78 is 0.992.

    Running statistics of norms are averaged like weights, as timm's `ModelEma` does; tensors that are not
    floating-point are copied. Each rank averages what it owns, so the average is the same on every layout.

    Args:
        tensors: parameters and buffers of this rank. The average begins with their values.

    Attributes:
        tensors: the average as it is saved, under names of its own.
        steps: that it has followed.
    """

    def __init__(self, tensors: Sequence[ShardedTensor], decay: float) -> None:
        self._decay = decay
        self.steps = 0
        current = [entry.tensor.detach() for entry in tensors]
        self._pairs = [(tensor.clone(), tensor) for tensor in current]
        self.tensors = [
            ShardedTensor(f"{AVERAGE}{entry.name}", average, entry.shard, is_parameter=False)
            for entry, (average, _) in zip(tensors, self._pairs, strict=True)
        ]

    @torch.no_grad()
    def update(self) -> None:
        """Follows a step, in two kernels at most on a GPU."""
        decay = min(self._decay, (1 + self.steps) / (10 + self.steps))
        self.steps += 1
        averaged = [pair for pair in self._pairs if pair[0].is_floating_point()]
        if averaged:
            torch._foreach_lerp_([a for a, _ in averaged], [t for _, t in averaged], 1 - decay)
        copied = [pair for pair in self._pairs if not pair[0].is_floating_point()]
        if copied:
            torch._foreach_copy_([a for a, _ in copied], [t for _, t in copied])

    @torch.no_grad()
    def restart(self) -> None:
        """Begins again, with the values that the tensors have now."""
        self.steps = 0
        for average, current in self._pairs:
            average.copy_(current)

    @torch.no_grad()
    def exchange(self) -> None:
        """Gives the tensors the values of the average, and the average theirs; a second time takes it back."""
        for average, current in self._pairs:
            before = current.clone()
            current.copy_(average)
            average.copy_(before)
