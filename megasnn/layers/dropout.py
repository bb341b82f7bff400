"""Dropout that no layout changes."""

from __future__ import annotations

import torch
from torch import Tensor

from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.keyed import KeyedLayer
from megasnn.random import keyed_generator


class ParallelDropout(KeyedLayer):
    """`[T, N, C_local, *space]`: values are zero with probability p, the others are divided by 1 - p (nn.Dropout).

    Each sample's mask `[T, C, *space]` is drawn over all channels from (seed, name, the sample's position in the
    training), and a rank takes its own channels of it. So neither the cut into micro-batches nor the ranks that compute
    them matter, nor where a run was interrupted. As with nn.Dropout, time steps are drawn independently of each other.

    Args:
        name: global name, part of the key: equal layers at two places drop different values.
    Raises:
        ValueError: p outside [0, 1); in training, positions that are missing or are not those of N samples.
    """

    def __init__(self, p: float, name: str, context: BuildContext | None = None) -> None:
        super().__init__()
        context = context_for(context)
        if not 0 <= p < 1:
            raise ValueError(f"--dropout must be at least 0 and below 1, got {p}")
        self.p, self.name = p, name
        self.group, self.seed = context.tensor, context.seed

    def forward(self, x: Tensor, samples: range | None = None) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if x.is_meta:
            return torch.empty_like(x)
        if samples is None or len(samples) != x.shape[1]:
            raise ValueError(f"{self.name}: dropout needs the positions of {x.shape[1]} samples, got {samples}")
        return x * self._mask(x, samples).to(x.device, x.dtype)

    def _mask(self, x: Tensor, samples: range) -> Tensor:
        """0 or 1 / (1 - p), shaped like `x`."""
        time, _, channels, *space = x.shape
        whole = (time, channels * self.group.size, *space)
        kept = [
            (torch.rand(whole, generator=keyed_generator(self.seed, "dropout", self.name, position)) >= self.p).narrow(
                1, self.group.rank * channels, channels
            )
            for position in samples
        ]
        return torch.stack(kept, dim=1).to(torch.float64) / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name!r}"
