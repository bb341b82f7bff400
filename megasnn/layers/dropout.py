"""Dropout and stochastic depth with random numbers keyed by sample: the same on every layout."""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import ClassVar

import torch
from torch import Tensor, nn

from megasnn.common.memory import copy_without_waiting
from megasnn.common.random import WORD_MASK, philox_key
from megasnn.kernels.philox import kept
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.facts import refuse_second_call
from megasnn.parallel.sharding import own_span

Positions = range | Tensor | None

_drawing: ContextVar[tuple[Positions, tuple[int, ...]]] = ContextVar("positions and frames", default=(None, ()))


class drawing_for:
    """Sets the samples that layers inside draw random numbers for.

    Args:
        positions: each sample's position in the whole training, from 0, keys its random numbers; None in evaluation. An
            int64 tensor `[N]` takes precedence over inner blocks' positions.
        frames: numbers of time steps and samples.
    """

    def __init__(self, positions: Positions, frames: tuple[int, ...] = ()) -> None:
        self._drawing = positions, frames

    def __enter__(self) -> None:
        outer, _ = _drawing.get()
        positions, frames = self._drawing
        # CUDA graphs read this tensor's memory, which is rewritten before each replay.
        self._token = _drawing.set((outer if isinstance(outer, Tensor) else positions, frames))

    def __exit__(self, *error: object) -> None:
        _drawing.reset(self._token)


def drawn_frames() -> tuple[int, ...]:
    return _drawing.get()[1]


class _Drop(nn.Module):
    """In training, multiplies by 0 with probability p, else by 1 / (1 - p).

    Raises ValueError for p outside [0, 1); in training, for no positions, or another number than samples.
    """

    mixes_tokens = False
    purpose: ClassVar[str]

    def __init__(self, p: float, name: str, context: BuildContext) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"{name}: the rate of {self.purpose} must be at least 0 and below 1, got {p}")
        self.p = p
        self.name = name
        self.seed = context.seed

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
        # Keys are computed on the host, and copied without waiting for the device.
        low, high = philox_key(self.seed, self.purpose, self.name)
        keys = copy_without_waiting(torch.stack([(positions & WORD_MASK) ^ low, (positions >> 32) ^ high]), x.device)
        return (x * self.draw_mask(x, keys)).mul_(1 / (1 - self.p))

    def draw_mask(self, x: Tensor, keys: Tensor) -> Tensor:
        """Boolean mask, True to keep, broadcastable to `x`. `keys`: `[2, N]`, one a sample."""
        raise NotImplementedError


class ParallelDropout(_Drop):
    """Dropout of `[T, N, C_local, *space]` (nn.Dropout).

    The mask depends on the seed, the layer's name, the sample's position in the training and the value's index in the
    sample; not on micro-batches, ranks or restarts. With --bptt-steps calls continue in time.

    Args:
        same_at_all_steps: one mask for all time steps (SpikingJelly's Dropout).
    """

    purpose = "dropout"

    def __init__(
        self, p: float, name: str, context: BuildContext | None = None, *, same_at_all_steps: bool = False
    ) -> None:
        context = context_for(context)
        super().__init__(p, name, context)
        self.same_at_all_steps = same_at_all_steps
        self.group = context.tp
        self.stateful = context.stateful
        self._parts = context.row_group or context.token_group
        # Rows or tokens of whole samples, and time steps in one call and in earlier calls on the same samples.
        self._whole = 0
        self._steps = context.time_steps
        self._steps_before = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            self._whole = x.shape[3] if x.ndim > 3 else 0
        return super().forward(x)

    def forget(self) -> None:
        """Returns to the first time step."""
        self._steps_before = 0

    def draw_mask(self, x: Tensor, keys: Tensor) -> Tensor:
        time, _, channels, *space = x.shape
        own = slice(None)
        if self._parts is not None and self._whole and space:
            # Draws for whole samples, and takes this rank's rows or tokens.
            part = own_span(self._whole, self._parts.sizes, self._parts.rank)
            own = slice(part.start, part.stop)
            space[0] = self._whole
        if self.same_at_all_steps:
            time = 1
        steps_before = self._steps_before
        stands_for_all = self.same_at_all_steps or time < self._steps
        if self.stateful and not stands_for_all:
            self._steps_before += time
        first = self.group.rank * channels
        local_channels = range(first, first + channels)
        all_channels = channels * self.group.size
        drawn = kept(self.p, keys, time, math.prod(space), local_channels, all_channels, steps_before).movedim(-1, 2)
        drawn = drawn.view(time, *x.shape[1:3], *space)
        return drawn[:, :, :, own] if space else drawn


class DropPath(_Drop):
    """Stochastic depth on a branch `[T, N, ...]` (arXiv 1603.09382): drops samples at all time steps."""

    # The output holds no spikes, because 1 / (1 - p) is no integer.
    purpose = "drop path"

    def __init__(self, p: float, name: str, context: BuildContext | None = None) -> None:
        super().__init__(p, name, context_for(context))

    def draw_mask(self, x: Tensor, keys: Tensor) -> Tensor:
        return kept(self.p, keys, 1, 1, range(1), 1).view(1, -1, *[1] * (x.ndim - 2))
