"""Stochastic depth that no layout changes."""

from __future__ import annotations

import torch
from torch import Tensor

from megasnn.kernels.philox import kept
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.holding import once
from megasnn.layers.keyed import KeyedLayer, sample_keys


class DropPath(KeyedLayer):
    """`[T, N, ...]`: samples are zero with probability p, at all time steps, and the others are divided by 1 - p.

    Stochastic depth (Huang et al. 2016, arXiv 1603.09382), for a branch that is added to its input. Whether a sample is
    kept follows from (seed, name, its position in the training), so it is the same on all tensor-parallel ranks and for
    any cut into micro-batches. What comes out are no spikes any more: 1 / (1 - p) is no whole number.

    Args:
        name: global name, part of the key: branches at two places drop different samples.
    Raises:
        ValueError: p outside [0, 1); in training, positions that are missing or are not those of N samples.
    """

    def __init__(self, p: float, name: str, context: BuildContext | None = None) -> None:
        super().__init__()
        context = context_for(context)
        if not 0 <= p < 1:
            raise ValueError(f"{name}: the rate of drop path must be at least 0 and below 1, got {p}")
        self.p, self.name, self.seed = p, name, context.seed

    @property
    def draws(self) -> bool:
        return self.p > 0

    def forward(self, x: Tensor, samples: range | None = None) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if samples is None or len(samples) != x.shape[1]:
            raise ValueError(
                f"{self.name}: drop path needs the positions of {x.shape[1]} samples, got {samples}; a "
                "block that has it inside is a KeyedLayer, and hands them on"
            )
        if x.is_meta:
            once(self, f"would draw the same both times: make a second one, of another name than {self.name!r}")
            return torch.empty_like(x)
        keys = sample_keys(self.seed, "drop path", self.name, samples, x.device)
        keep = kept(self.p, keys, 1, 1, range(1), 1)
        return (x * keep.view(1, -1, *[1] * (x.ndim - 2))).mul_(1 / (1 - self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name!r}"
