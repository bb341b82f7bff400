"""What the loader asks of a kind of sample: images, or the recordings of event cameras."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from numpy.typing import NDArray


class FormatMismatch(ValueError):
    """A sample that is whole, but not of the shape that the model takes: none to skip, but a mistake in the flags."""


class Decoder(Protocol):
    """From the bytes of a sample's file to an array.

    Attributes:
        suffixes: endings of the files it decodes.
    """

    @property
    def suffixes(self) -> tuple[str, ...]: ...

    def decode(self, data: bytes) -> NDArray[Any]:
        """One sample. Raises ValueError for bytes that cannot be decoded, FormatMismatch for those that do not fit."""


class SampleFormat(Decoder, Protocol):
    """From the bytes of samples' files to the model's input.

    Attributes:
        augmentations: names of the random changes that its arrays can take.
    """

    @property
    def augmentations(self) -> tuple[str, ...]: ...

    def to_tensor(self, batch: list[NDArray[Any]]) -> torch.Tensor:
        """Decoded samples as one float32 tensor, the samples first."""
