"""Sample order: a function of seed, data size and position.

Positions count samples from the start. Epoch e is positions [e·n, (e+1)·n), with its own permutation, so a run
continues anywhere without replaying. An epoch shorter than the data leaves out the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megasnn.common.random import keyed_seed


class Span(NamedTuple):
    """Consecutive positions in one epoch: epoch, first position, samples."""

    epoch: int
    position: int
    samples: NDArray[np.int64]


@dataclass(frozen=True)
class SampleOrder:
    """Order of `samples` samples under `seed`; file order without `shuffle`.

    Attributes:
        epoch: samples per epoch, at most `samples`.
    """

    samples: int
    seed: int
    shuffle: bool
    epoch: int

    def spans(self, start: int, count: int) -> list[Span]:
        """`count` positions from `start` on, one span per epoch."""
        found: list[Span] = []
        while count > 0:
            epoch, position = divmod(start, self.epoch)
            samples = self.permutation(epoch)[position : min(position + count, self.epoch)]
            found.append(Span(epoch, position, samples))
            start += len(samples)
            count -= len(samples)
        return found

    def substitutes(self, epoch: int, position: int) -> Iterator[int]:
        """Yields the samples after a position, once around the epoch."""
        permutation = self.permutation(epoch)
        # Samples that a shorter epoch leaves out are substitutes, too.
        for step in range(1, self.samples):
            yield int(permutation[(position + step) % self.samples])

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """Samples in an epoch's order, int64 `[samples]`."""
        shuffled_epoch = epoch if self.shuffle else None
        return _permutation(self.samples, self.seed, shuffled_epoch)


# A batch usually lies in one epoch or two, of training or of evaluation.
@lru_cache(maxsize=4)
def _permutation(samples: int, seed: int, epoch: int | None) -> NDArray[np.int64]:
    if epoch is None:
        return np.arange(samples)
    # Sorted raw words, since NumPy keeps Philox's stream stable between versions, but not `permutation`.
    words = np.random.Philox(key=keyed_seed(seed, "order", epoch)).random_raw(samples)
    return np.argsort(words, kind="stable")
