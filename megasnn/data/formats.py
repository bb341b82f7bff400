"""What the loader asks of a kind of sample: images, or the recordings of event cameras.

Nothing here imports torch before a tensor is asked for, so that the processes that read samples start at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megasnn.augment import AUGMENTATIONS, Augmentation

if TYPE_CHECKING:
    import torch


class FormatMismatch(ValueError):
    """A sample that is whole, but not of the shape that the model takes: the flags are wrong, it is not skipped."""


class Decoder(Protocol):
    """From the bytes of a sample's file to an array.

    Attributes:
        suffixes: endings of the files it decodes.
        limit: bytes that a sample may take, in its file or decoded.
    """

    @property
    def suffixes(self) -> tuple[str, ...]: ...

    @property
    def limit(self) -> int: ...

    def decode(self, data: bytes) -> NDArray[Any]:
        """One sample. Raises ValueError for bytes that cannot be decoded, FormatMismatch for those that do not fit."""


class SampleFormat(Decoder, Protocol):
    """From the bytes of samples' files to the model's input.

    Attributes:
        kind: of its samples, as augmentations name it.
        axes: the model's axes of a batch, as axes of the array of its samples.
    """

    @property
    def kind(self) -> str: ...

    @property
    def axes(self) -> tuple[int, ...]: ...

    def augmentation(self, name: str) -> Augmentation:
        """A random change by its name. Raises ValueError for one that there is not, or not for such samples."""
        found = AUGMENTATIONS[name]
        if self.kind not in found.samples:
            fitting = [other for other, each in AUGMENTATIONS.items() if self.kind in each.samples]
            raise ValueError(f"--augment {name} is not for {self.kind}; choose one of {', '.join(fitting)}")
        return found

    def fill(self, values: NDArray[np.float32], sample: NDArray[Any]) -> None:
        """Writes a decoded sample to `values`, of its shape, as the numbers that the model takes."""

    def to_tensor(self, batch: Sequence[NDArray[Any]]) -> torch.Tensor:
        """Decoded samples as the model takes them: float32, the samples first."""
        values = np.empty((len(batch), *batch[0].shape), np.float32)
        for target, sample in zip(values, batch, strict=True):
            self.fill(target, sample)
        return self.as_tensor(values)

    def as_tensor(self, values: NDArray[np.float32]) -> torch.Tensor:
        """What `fill` wrote to `values [n, *sample]`, in the same memory, with the axes that the model takes."""
        import torch

        return torch.from_numpy(values).permute(self.axes)
