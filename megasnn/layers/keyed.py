"""Layers whose result depends on which samples they compute, not only on the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from megasnn.pinned import copy_without_waiting, without_waiting
from megasnn.random import philox_key

KeysOf = Callable[[range], Tensor]


class KeyedLayer(nn.Module):
    """A layer with `forward(x, samples)` in place of `forward(x)`.

    `samples` are the positions of the micro-batch's N samples in the whole training (0 for the very first one): what a
    keyed random number hangs on. They come with every call, so that several micro-batches can be under way, and a
    forward that is computed again sees the same. None where positions mean nothing, in evaluation.
    """

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers itself, in training."""
        return False


def sample_keys(seed: int, purpose: str, name: str, samples: range, device: torch.device) -> Tensor:
    """A key for each sample, as `megasnn.kernels.philox.kept` takes them: int64 `[2, N]`."""

    def of(positions: range) -> Tensor:
        keys = [philox_key(seed, purpose, name, position) for position in positions]
        return torch.tensor(keys, dtype=torch.int64).view(-1, 2).t().contiguous()

    refilled = _entered.get()
    return without_waiting(of(samples), device) if refilled is None else refilled.place(of, len(samples), device)


class RefilledKeys:
    """The keys of layers whose kernels are taken down and started again, for other samples each time."""

    def __init__(self) -> None:
        self._places: list[tuple[Tensor, KeysOf]] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, layers draw with keys that are here, and have no values yet."""
        token = _entered.set(self)
        try:
            yield
        finally:
            _entered.reset(token)

    def place(self, of: KeysOf, samples: int, device: torch.device) -> Tensor:
        """Where the keys of so many samples are."""
        place = torch.empty(2, samples, dtype=torch.int64, device=device)
        self._places.append((place, of))
        return place

    def refill(self, samples: range | None) -> None:
        """Writes the keys of these samples."""
        for place, of in self._places:
            assert samples is not None
            copy_without_waiting(of(samples), place)


_entered: ContextVar[RefilledKeys | None] = ContextVar("RefilledKeys", default=None)
