"""Dropout and stochastic depth that no layout changes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megasnn.kernels.philox import kept
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.holding import once
from megasnn.layers.keyed import KeyedLayer, sample_keys
from megasnn.layers.rows import rows_of


class ParallelDropout(KeyedLayer):
    """`[T, N, C_local, *space]`: values are zero with probability p, the others are divided by 1 - p (nn.Dropout).

    Whether a value is kept follows from (seed, name, the sample's position in the training) and its place among all
    time steps, pixels and channels of the sample, and a rank draws for its own channels only. So neither the cut into
    micro-batches nor the ranks that compute them matter, nor where a run was interrupted. As with nn.Dropout, time
    steps are drawn independently of each other; with --bptt-steps each call goes on from the steps of the last one.

    Args:
        name: global name, part of the key: equal layers at two places drop different values.
        same_at_all_steps: what is dropped is dropped at all time steps (SpikingJelly's Dropout).
    Raises:
        ValueError: p outside [0, 1); in training, positions that are missing or are not those of N samples.
    """

    def __init__(
        self, p: float, name: str, context: BuildContext | None = None, *, same_at_all_steps: bool = False
    ) -> None:
        super().__init__()
        context = context_for(context)
        if not 0 <= p < 1:
            raise ValueError(f"--dropout must be at least 0 and below 1, got {p}")
        self.p, self.name, self.same_at_all_steps = p, name, same_at_all_steps
        self.group, self.seed, self.carries = context.tensor, context.seed, context.carries
        self._rows, self._height = rows_of(context), 0
        self._steps, self._steps_before = context.time_steps, 0  # of a call; of the calls before, where they go on

    @property
    def draws(self) -> bool:
        return self.p > 0

    def forward(self, x: Tensor, samples: range | None = None) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if samples is None or len(samples) != x.shape[1]:
            raise ValueError(
                f"{self.name}: dropout needs the positions of {x.shape[1]} samples, got {samples}; a "
                "block that has it inside is a KeyedLayer, and hands them on"
            )
        if x.is_meta:
            once(self, f"would draw the same both times: make a second one, of another name than {self.name!r}")
            self._height = x.shape[3] if x.ndim > 3 else 0
            return torch.empty_like(x)
        return (x * self._kept(x, samples)).mul_(1 / (1 - self.p))

    def forget(self) -> None:
        """The next call is on the first time steps."""
        self._steps_before = 0

    def _kept(self, x: Tensor, samples: range) -> Tensor:
        """Which values are not zeroed: bool, shaped like `x`, perhaps with a single time step."""
        time, _, channels, *space = x.shape
        own = slice(None)
        if self._rows is not None and self._height and space:  # drawn for whole images
            rows = self._rows.shared(self._height)[self._rows.group.rank]
            own, space[0] = slice(rows.start, rows.stop), self._height
        time = 1 if self.same_at_all_steps else time
        first = self.group.rank * channels
        before = self._steps_before
        stands_for_all = self.same_at_all_steps or time < self._steps
        if self.carries and not stands_for_all:
            self._steps_before += time
        keys = sample_keys(self.seed, "dropout", self.name, samples, x.device)
        mine, whole = range(first, first + channels), channels * self.group.size
        drawn = kept(self.p, keys, time, math.prod(space), mine, whole, before).movedim(-1, 2)
        drawn = drawn.view(time, *x.shape[1:3], *space)
        return drawn[:, :, :, own] if space else drawn

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name!r}"


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
