"""From the bytes of a sample's file to the model's input: what images and event frames have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megasnn.augment import AUGMENTATIONS, Augmentation


class FormatMismatch(ValueError):
    """A sample that is whole, but not of the shape that the model takes: the flags are wrong, it is not skipped."""


class SampleFormat(Protocol):
    """A kind of samples.

    Attributes:
        kind: of the samples, as augmentations name it.
        suffixes: endings of the files it decodes.
        axes: the model's axes of a batch, as axes of the array of its samples.
        limit: bytes that a sample may take, in its file or decoded.
    """

    kind: str
    suffixes: tuple[str, ...]
    axes: tuple[int, ...]

    @property
    def limit(self) -> int: ...

    def decode(self, data: bytes) -> NDArray[Any]:
        """One sample. Raises ValueError for bytes that cannot be decoded, FormatMismatch for those that do not fit."""

    def fill(self, values: NDArray[np.float32], sample: NDArray[Any]) -> None:
        """Writes a decoded sample to `values`, of its shape, as the numbers that the model takes."""

    def augmentation(self, name: str) -> Augmentation:
        """A random change by its name. Raises ValueError for one that there is not, or not for such samples."""
        found = AUGMENTATIONS[name]
        if self.kind not in found.samples:
            fitting = [other for other, each in AUGMENTATIONS.items() if self.kind in each.samples]
            raise ValueError(f"--augment {name} is not for {self.kind}; choose one of {', '.join(fitting)}")
        return found

    def batch(self, samples: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        """Decoded samples as the model takes them, float32, the samples first."""
        values = np.empty((len(samples), *samples[0].shape), np.float32)
        for target, sample in zip(values, samples, strict=True):
            self.fill(target, sample)
        return values.transpose(self.axes)
