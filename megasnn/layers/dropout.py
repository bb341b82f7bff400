"""Dropout and stochastic depth that no layout changes: what is drawn follows from the sample, not from the rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar

import torch
from torch import Tensor, nn

from megasnn.common.memory import without_waiting
from megasnn.common.random import WORD_MASK, philox_key
from megasnn.kernels.philox import kept
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.facts import refuse_second_call
from megasnn.layers.row_context import row_group, shared_rows

Positions = range | Tensor | None

_drawing: ContextVar[tuple[Positions, tuple[int, ...]]] = ContextVar("positions and frames", default=(None, ()))


@contextmanager
def drawing_for(positions: Positions, frames: tuple[int, ...] = ()) -> Iterator[None]:
    """Lets layers draw for the samples of a micro-batch.

    Args:
        positions: of its N samples in the whole training (0 for the very first one), which keyed random numbers follow
            from; None where they mean nothing, in evaluation. A tensor, int64 `[N]`, goes before what is said inside of
            it: its memory stays where it is, so that kernels that are started again draw for other samples.
        frames: number of time steps and of samples.
    """
    outer, _ = _drawing.get()
    token = _drawing.set((outer if isinstance(outer, Tensor) else positions, frames))
    try:
        yield
    finally:
        _drawing.reset(token)


def drawn_frames() -> tuple[int, ...]:
    """Number of time steps and of samples that layers draw for."""
    return _drawing.get()[1]


class _Drop(nn.Module):
    """Multiplies by 0 with probability p, and by 1 / (1 - p) otherwise, in training.

    Args:
        name: global name, part of the key: equal layers at two places drop other values.
    Raises:
        ValueError: p outside [0, 1); in training, positions that are missing or are not those of N samples.
    """

    purpose: ClassVar[str]

    def __init__(self, p: float, name: str, context: BuildContext) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"{name}: the rate of {self.purpose} must be at least 0 and below 1, got {p}")
        self.p, self.name, self.seed = p, name, context.seed

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        positions, _ = _drawing.get()
        if positions is None or len(positions) != x.shape[1]:
            raise ValueError(
                f"{self.name}: {self.purpose} needs the positions of {x.shape[1]} samples, got {positions}: give "
                "apply_layer the samples"
            )
        if x.is_meta:
            refuse_second_call(self, f"would draw the same both times: make a second one, not named {self.name!r}")
            return torch.empty_like(x)
        if isinstance(positions, range):
            positions = torch.arange(positions.start, positions.stop)
        low, high = philox_key(self.seed, self.purpose, self.name)
        keys = without_waiting(torch.stack([(positions & WORD_MASK) ^ low, (positions >> 32) ^ high]), x.device)
        return (x * self.kept(x, keys)).mul_(1 / (1 - self.p))

    def kept(self, x: Tensor, keys: Tensor) -> Tensor:
        """Mask of the values that are kept: bool, of a shape that meets `x`. `keys` are the samples', `[2, N]`."""
        raise NotImplementedError


class ParallelDropout(_Drop):
    """`[T, N, C_local, *space]`: values are zero with probability p, the others are divided by 1 - p (nn.Dropout).

    Whether a value is kept follows from (seed, name, the sample's position in the training) and its place among all
    time steps, pixels and channels of the sample: micro-batches, ranks and interruptions change nothing. Time steps are
    drawn independently of each other; with --bptt-steps each call goes on from the steps of the last one.

    Args:
        same_at_all_steps: what is dropped is dropped at all time steps (SpikingJelly's Dropout).
    """

    purpose = "dropout"

    def __init__(
        self, p: float, name: str, context: BuildContext | None = None, *, same_at_all_steps: bool = False
    ) -> None:
        context = context_for(context)
        super().__init__(p, name, context)
        self.same_at_all_steps, self.group, self.carries = same_at_all_steps, context.tp, context.carries
        self._rows, self._height = row_group(context), 0
        self._steps, self._steps_before = context.time_steps, 0  # of a call; of the calls before, where they go on

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            self._height = x.shape[3] if x.ndim > 3 else 0
        return super().forward(x)

    def forget(self) -> None:
        """The next call is on the first time steps."""
        self._steps_before = 0

    def kept(self, x: Tensor, keys: Tensor) -> Tensor:
        time, _, channels, *space = x.shape
        own = slice(None)
        if self._rows is not None and self._height and space:  # drawn for whole images
            rows = shared_rows(self._height, self._rows.size)[self._rows.rank]
            own, space[0] = slice(rows.start, rows.stop), self._height
        time = 1 if self.same_at_all_steps else time
        first, before = self.group.rank * channels, self._steps_before
        stands_for_all = self.same_at_all_steps or time < self._steps
        if self.carries and not stands_for_all:
            self._steps_before += time
        mine, whole = range(first, first + channels), channels * self.group.size
        drawn = kept(self.p, keys, time, math.prod(space), mine, whole, before).movedim(-1, 2)
        drawn = drawn.view(time, *x.shape[1:3], *space)
        return drawn[:, :, :, own] if space else drawn


class DropPath(_Drop):
    """`[T, N, ...]`: samples are zero with probability p, at all time steps, and the others are divided by 1 - p.

    Stochastic depth (Huang et al. 2016, arXiv 1603.09382), for a branch that is added to its input. Drawn by sample, as
    dropout. What comes out are no spikes any more: 1 / (1 - p) is no whole number.
    """

    purpose = "drop path"

    def __init__(self, p: float, name: str, context: BuildContext | None = None) -> None:
        super().__init__(p, name, context_for(context))

    def kept(self, x: Tensor, keys: Tensor) -> Tensor:
        return kept(self.p, keys, 1, 1, range(1), 1).view(1, -1, *[1] * (x.ndim - 2))
