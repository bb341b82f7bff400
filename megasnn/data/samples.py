"""Interface of a data set: samples by index, from shards or from Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasnn.augment import SampleKey
from megasnn.data.formats import BatchFormat


class BrokenSample(ValueError):
    """A sample that cannot be decoded."""


def broken_sample(sample: str, why: str, remedy: str) -> BrokenSample:
    """Error of a sample that a training may skip.

    Args:
        sample: its name, at the start of the sentence.
    """
    return BrokenSample(f"{sample} {why}; {remedy} (--skip-broken-samples skips such samples in training)")


class SampleSource(ABC):
    """Samples by index; can be pickled for worker processes.

    Attributes:
        format: joins samples into batches.
        labels: class of each sample, int64 `[samples]`; None where only reading a sample tells it.
    """

    format: BatchFormat
    labels: NDArray[np.int64] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def sample(self, index: int, key: SampleKey | None = None) -> Any:
        """Reads one sample; a key changes it at random.

        Raises:
            BrokenSample: damaged or too large.
            ValueError: it does not fit the model, or the data have changed.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Identity of the data: a run resumes on equal ones only."""
