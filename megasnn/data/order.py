"""Which sample comes when: a function of the seed, the number of samples and the position, nothing else.

Positions count samples from the start of training. Epoch e is the positions [e·n, (e+1)·n) and holds every
sample once, in its own permutation. So a run continues at any position without replaying, and a batch may
straddle two epochs. An epoch may also be shorter: then it leaves out the end of its permutation.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from megasnn.random import keyed_seed


class Slot(NamedTuple):
    """One place in the order: the epoch, the place inside it, and the sample that belongs there."""

    epoch: int
    place: int
    sample: int


class Stretch(NamedTuple):
    """Places of one epoch that follow each other: the first of them, and the samples that belong there.

    It is much smaller than its slots on the way to another process.
    """

    epoch: int
    place: int
    samples: list[int]

    def slots(self) -> Iterator[Slot]:
        for step, sample in enumerate(self.samples):
            yield Slot(self.epoch, self.place + step, sample)


class SampleOrder:
    """The order of `samples` samples under `seed`, or file order in every epoch when `shuffle` is off.

    epoch: samples of an epoch; all of them by default.
    """

    def __init__(self, samples: int, seed: int, shuffle: bool, epoch: int | None = None) -> None:
        self.samples = samples
        self.epoch = samples if epoch is None else epoch
        self._seed = seed
        self._shuffle = shuffle
        self.permutation = lru_cache(maxsize=2)(self._permutation)  # a batch usually lies in one epoch or two

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process sorts its own permutations."""
        return SampleOrder, (self.samples, self._seed, self._shuffle, self.epoch)

    def slots(self, position: int, count: int) -> list[Slot]:
        """The `count` slots from `position` on, across as many epochs as it takes."""
        return [slot for stretch in self.stretches(position, count) for slot in stretch.slots()]

    def stretches(self, position: int, count: int) -> list[Stretch]:
        """These slots, one stretch for each epoch."""
        found = []
        while count:
            epoch, place = divmod(position, self.epoch)
            taken = self.permutation(epoch)[place : min(place + count, self.epoch)].tolist()
            found.append(Stretch(epoch, place, taken))
            position, count = position + len(taken), count - len(taken)
        return found

    def from_slot(self, slot: Slot) -> Iterator[int]:
        """The samples from a slot on, once around its epoch: its own, then those that can stand in for it."""
        permutation = self.permutation(slot.epoch)
        for step in range(self.samples):
            yield int(permutation[(slot.place + step) % self.samples])

    def _permutation(self, epoch: int) -> np.ndarray:
        """int64 `[samples]`, from sorting raw Philox words: NumPy keeps that stream stable."""
        if not self._shuffle:
            return np.arange(self.samples)
        words = np.random.Philox(key=keyed_seed(self._seed, "order", epoch)).random_raw(self.samples)
        return np.argsort(words, kind="stable")
