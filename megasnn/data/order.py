"""Order of samples: a function of the seed, the number of samples and the position, nothing else.

Positions count samples from the start of training. Epoch e is the positions [e·n, (e+1)·n) and holds every sample
once, in its own permutation. So a run continues at any position without replaying, and a batch may straddle two epochs.
An epoch may also be shorter: then it leaves out the end of its permutation.
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
    """Positions of one epoch that follow each other: the epoch, the place in it of the first, and their samples."""

    epoch: int
    position: int
    samples: NDArray[np.int64]


@dataclass(frozen=True)
class SampleOrder:
    """Order of `samples` samples under `seed`, or file order in every epoch when `shuffle` is off.

    Attributes:
        epoch: number of samples of an epoch, at most `samples`.
    """

    samples: int
    seed: int
    shuffle: bool
    epoch: int

    def spans(self, start: int, count: int) -> list[Span]:
        """The `count` positions from `start` on, across as many epochs as it takes."""
        found: list[Span] = []
        while count > 0:
            epoch, position = divmod(start, self.epoch)
            samples = self.permutation(epoch)[position : min(position + count, self.epoch)]
            found.append(Span(epoch, position, samples))
            start, count = start + len(samples), count - len(samples)
        return found

    def substitutes(self, epoch: int, position: int) -> Iterator[int]:
        """The samples that follow a place of an epoch, once around it."""
        permutation = self.permutation(epoch)
        for step in range(1, self.samples):
            yield int(permutation[(position + step) % self.samples])

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """Samples in the order of an epoch, int64 `[samples]`."""
        return _permutation(self.samples, self.seed, epoch if self.shuffle else None)


@lru_cache(maxsize=4)  # a batch usually lies in one epoch or two, of training or of evaluation
def _permutation(samples: int, seed: int, epoch: int | None) -> NDArray[np.int64]:
    """Sorts raw Philox words: NumPy keeps that stream stable between its versions. Without an epoch, file order."""
    if epoch is None:
        return np.arange(samples)
    words = np.random.Philox(key=keyed_seed(seed, "order", epoch)).random_raw(samples)
    return np.argsort(words, kind="stable")
