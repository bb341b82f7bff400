"""Dropout and stochastic depth that no layout changes: what is drawn follows from the sample, not from the rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar

import torch
from torch import Tensor, nn

from megasnn.host_memory import copy_without_waiting, without_waiting
from megasnn.kernels.philox import kept
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.row_context import rows_of, shared_rows
from megasnn.layers.shape_inference import refuse_second_call
from megasnn.random import philox_key

KeysOf = Callable[[range], Tensor]


class KeyedLayer(nn.Module):
    """A layer with `forward(x, samples)` in place of `forward(x)`.

    `samples` are the positions of the micro-batch's N samples in the whole training (0 for the very first one): what a
    keyed random number hangs on. They come with every call, so that several micro-batches can be under way, and a
    forward that is computed again sees the same. None where positions mean nothing, in evaluation.
    """


class _Drop(KeyedLayer):
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

    def forward(self, x: Tensor, samples: range | None = None) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if samples is None or len(samples) != x.shape[1]:
            raise ValueError(
                f"{self.name}: {self.purpose} needs the positions of {x.shape[1]} samples, got {samples}; a block that "
                "has it inside is a KeyedLayer, and hands them on"
            )
        if x.is_meta:
            why = f"would draw the same both times: make a second one, of another name than {self.name!r}"
            refuse_second_call(self, why)
            return torch.empty_like(x)
        keys = sample_keys(self.seed, self.purpose, self.name, samples, x.device)
        return (x * self.kept(x, keys)).mul_(1 / (1 - self.p))

    def kept(self, x: Tensor, keys: Tensor) -> Tensor:
        """Mask of the values that are kept: bool, of a shape that meets `x`. Args: keys: of the samples, int64 `[2,
        N]`."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name!r}"


class ParallelDropout(_Drop):
    """`[T, N, C_local, *space]`: values are zero with probability p, the others are divided by 1 - p (nn.Dropout).

    Whether a value is kept follows from (seed, name, the sample's position in the training) and its place among all
    time steps, pixels and channels of the sample, and a rank draws for its own channels only. So neither the cut into
    micro-batches nor the ranks that compute them matter, nor where a run was interrupted. As with nn.Dropout, time
    steps are drawn independently of each other; with --bptt-steps each call goes on from the steps of the last one.

    Args:
        same_at_all_steps: what is dropped is dropped at all time steps (SpikingJelly's Dropout).
        p, name, and raises: as of `_Drop`.
    """

    purpose = "dropout"

    def __init__(
        self, p: float, name: str, context: BuildContext | None = None, *, same_at_all_steps: bool = False
    ) -> None:
        context = context_for(context)
        super().__init__(p, name, context)
        self.same_at_all_steps, self.group, self.carries = same_at_all_steps, context.tp, context.carries
        self._rows, self._height = rows_of(context), 0
        self._steps, self._steps_before = context.time_steps, 0  # of a call; of the calls before, where they go on

    def forward(self, x: Tensor, samples: range | None = None) -> Tensor:
        if x.is_meta:
            self._height = x.shape[3] if x.ndim > 3 else 0
        return super().forward(x, samples)

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

    Stochastic depth (Huang et al. 2016, arXiv 1603.09382), for a branch that is added to its input. Whether a sample is
    kept follows from (seed, name, its position in the training), so it is the same on all tensor-parallel ranks and for
    any cut into micro-batches. What comes out are no spikes any more: 1 / (1 - p) is no whole number.

    Args and raises as of `_Drop`.
    """

    purpose = "drop path"

    def __init__(self, p: float, name: str, context: BuildContext | None = None) -> None:
        super().__init__(p, name, context_for(context))

    def kept(self, x: Tensor, keys: Tensor) -> Tensor:
        return kept(self.p, keys, 1, 1, range(1), 1).view(1, -1, *[1] * (x.ndim - 2))


_entered: ContextVar[RefilledKeys | None] = ContextVar("RefilledKeys", default=None)


def sample_keys(seed: int, purpose: str, name: str, samples: range, device: torch.device) -> Tensor:
    """A key for each sample, as `megasnn.kernels.philox.kept` takes them: int64 `[2, N]`."""

    def of(positions: range) -> Tensor:
        keys = [philox_key(seed, purpose, name, position) for position in positions]
        return torch.tensor(keys, dtype=torch.int64).view(-1, 2).t().contiguous()

    refilled = _entered.get()
    return without_waiting(of(samples), device) if refilled is None else refilled.place(of)


class RefilledKeys:
    """The keys of layers whose kernels are taken down and started again, for other samples each time.

    Their memory is taken before anything is taken down: written before kernels start, it must be none that they use for
    something else first.

    Args:
        module: its layers draw. samples: None where they do not.
    """

    def __init__(self, module: nn.Module, samples: range | None, device: torch.device) -> None:
        draws = sum(isinstance(each, _Drop) for _, each in module.named_modules(remove_duplicate=False))
        count = 0 if samples is None else len(samples)
        self._free = [torch.empty(2, count, dtype=torch.int64, device=device) for _ in range(draws)]
        self._places: list[tuple[Tensor, KeysOf]] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Lets layers draw with keys that are here, and have no values yet."""
        token = _entered.set(self)
        try:
            yield
        finally:
            _entered.reset(token)

    def place(self, of: KeysOf) -> Tensor:
        """Place for the keys of the samples."""
        place = self._free.pop()
        self._places.append((place, of))
        return place

    def refill(self, samples: range | None) -> None:
        """Writes the keys of these samples."""
        for place, of in self._places:
            assert samples is not None
            copy_without_waiting(of(samples), place)
