"""Random access to the samples of a list of shards."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megasnn.augment import Key
from megasnn.data.formats import FormatMismatch, SampleFormat
from megasnn.data.shards import Shard
from megasnn.files import require_size


class BrokenSample(ValueError):
    """A sample whose data cannot be decoded."""


class ShardDataset:
    """Samples of `shards`, one shard after the other, decoded by `format`. It can be pickled.

    Raises:
        ValueError: a label outside [0, num_classes). All are checked here, before anything is trained.
    """

    def __init__(self, shards: Sequence[Shard], format: SampleFormat, num_classes: int) -> None:
        self.format = format
        self._shards = list(shards)
        self._first = np.cumsum([0] + [len(shard) for shard in shards])
        self.labels = np.concatenate([shard.labels for shard in shards])
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= num_classes))
        if len(wrong):
            raise ValueError(
                f"{len(wrong)} of {len(self)} labels are outside 0..{num_classes - 1}, the first one "
                f"{self.labels[wrong[0]]} of {self.describe(int(wrong[0]))}, largest {self.labels.max()}; "
                f"raise --num-classes (now {num_classes}) or mend the data"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def key(self, index: int) -> str:
        """Name of a sample inside its shard."""
        shard, place = self._locate(index)
        return shard.keys[place].decode()

    def describe(self, index: int) -> str:
        """Name of a sample and its shard, for messages."""
        return f"sample {self.key(index)!r} of shard {self._locate(index)[0].name}"

    def sample(self, index: int, key: Key | None = None) -> NDArray[Any]:
        """Decodes a sample: an image `[H, W, C]`, event frames `[T, 2, H, W]`; with a key it is changed at random.

        Raises:
            BrokenSample: it cannot be decoded, or is too large.
            ValueError: it does not fit the model, or the shard was changed, cut or removed after it was indexed.
        """
        shard, place = self._locate(index)
        try:
            require_size("its file", int(shard.sizes[place]), self.format.limit)
            return self.format.decode(_read(shard, place), key)
        except FormatMismatch as error:
            raise ValueError(f"{self.describe(index)} {error}") from error
        except OSError as error:
            raise ValueError(f"{self.describe(index)} cannot be read: {error}; start again") from error
        except ValueError as error:
            raise BrokenSample(
                f"{self.describe(index)} cannot be decoded: {error}; mend it or leave it out "
                "(training does with --skip-broken-samples)"
            ) from error

    def fingerprint(self) -> str:
        """Hash of the samples' names, classes and data sizes in file order.

        It tells data sets apart without reading them, and is the same wherever they lie, packed or unpacked.
        """
        digest = hashlib.blake2b(digest_size=16)
        for shard in self._shards:
            digest.update(b"".join(key + b"\0" for key in shard.keys.tolist()))
        digest.update(self.labels.tobytes())
        digest.update(np.concatenate([shard.sizes for shard in self._shards]).tobytes())
        return f"{len(self)}-{digest.hexdigest()}"

    def _locate(self, index: int) -> tuple[Shard, int]:
        shard = bisect_right(self._first, index) - 1  # for one number several times faster than NumPy's
        return self._shards[shard], index - int(self._first[shard])


def _read(shard: Shard, place: int) -> bytes:
    """Raises OSError where the shard is not the file that was indexed."""
    file = _opened(shard.tar, shard.state).fileno()
    status = os.fstat(file)
    if (status.st_size, status.st_mtime_ns) != shard.state:
        raise OSError(f"{shard.tar} was changed while in use")
    return os.pread(file, int(shard.sizes[place]), int(shard.offsets[place]))


@lru_cache(maxsize=16)  # files that a process keeps open
def _opened(tar: Path, state: tuple[int, int]) -> BinaryIO:
    return open(tar, "rb", buffering=0)
