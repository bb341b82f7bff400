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

from megasnn.random import keyed_seed


class Position(NamedTuple):
    """One position of the order: its epoch, its place in that epoch, and the sample that belongs there."""

    epoch: int
    place: int
    sample: int


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

    def positions(self, start: int, count: int) -> list[Position]:
        """The `count` positions from `start` on, across as many epochs as it takes."""
        found: list[Position] = []
        while len(found) < count:
            epoch, place = divmod(start + len(found), self.epoch)
            end = min(place + count - len(found), self.epoch)
            samples = self.permutation(epoch)[place:end].tolist()
            found += [Position(epoch, place + step, sample) for step, sample in enumerate(samples)]
        return found

    def substitutes(self, position: Position) -> Iterator[int]:
        """The sample at a position, then those that follow it, once around its epoch."""
        yield position.sample
        permutation = self.permutation(position.epoch)
        for step in range(1, self.samples):
            yield int(permutation[(position.place + step) % self.samples])

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """Samples in the order of an epoch, int64 `[samples]`."""
        return _permutation(self.samples, self.seed, epoch) if self.shuffle else np.arange(self.samples)


@lru_cache(maxsize=4)  # a batch usually lies in one epoch or two, of training or of evaluation
def _permutation(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Sorts raw Philox words: NumPy keeps that stream stable between its versions."""
    words = np.random.Philox(key=keyed_seed(seed, "order", epoch)).random_raw(samples)
    return np.argsort(words, kind="stable")
