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

from megasnn.augment import Key
from megasnn.data.formats import FormatMismatch, SampleFormat
from megasnn.data.shards import Shard
from megasnn.files import require_size


class BrokenSample(ValueError):
    """A sample whose data cannot be decoded."""


class ShardDataset:
    """Samples of `shards`, one shard after the other, decoded by `format`. It can be pickled.

    Raises:
        ValueError: a label outside [0, num_classes), where there are classes; all are checked, before training.
    """

    def __init__(self, shards: Sequence[Shard], format: SampleFormat, num_classes: int) -> None:
        self.format = format
        self._shards = [(shard.name, shard.tar, shard.state) for shard in shards]
        self._first = np.cumsum([0] + [len(shard.members.keys) for shard in shards])
        members = [shard.members for shard in shards]  # as arrays: lists would take several times the memory
        self._keys = np.array([key.encode() for each in members for key in each.keys])
        self.labels = np.array([label for each in members for label in each.labels], np.int64)
        first, last = ("starts", "ends") if format.reads_all else ("offsets", "sizes")
        self._offsets = np.array([offset for each in members for offset in getattr(each, first)], np.int64)
        self._sizes = np.array([size for each in members for size in getattr(each, last)], np.int64)
        if format.reads_all:
            self._sizes -= self._offsets
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= num_classes))
        if num_classes and len(wrong):
            raise ValueError(
                f"{len(wrong)} of {len(self)} labels are outside 0..{num_classes - 1}, the first one "
                f"{self.labels[wrong[0]]} of {self.describe(int(wrong[0]))}, largest {self.labels.max()}; "
                f"raise --num-classes (now {num_classes}) or mend the data"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def key(self, index: int) -> str:
        """Name of a sample inside its shard."""
        return self._keys[index].decode()

    def describe(self, index: int) -> str:
        """Name of a sample and its shard, for messages."""
        return f"sample {self.key(index)!r} of shard {self._shard(index)[0]}"

    def sample(self, index: int, key: Key | None = None) -> Any:
        """Decodes a sample: an image `[H, W, C]`, event frames `[T, 2, H, W]`, or arrays by name; a key changes it at
        random.

        Raises:
            BrokenSample: it cannot be decoded, or is too large.
            ValueError: it does not fit the model, or the shard was changed, cut or removed after it was indexed.
        """
        size, offset = int(self._sizes[index]), int(self._offsets[index])
        try:
            require_size("its file", size)
            return self.format.decode(_read(*self._shard(index)[1:], size, offset), key)
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

        It tells data sets apart without reading them, and is the same wherever they lie.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(b"".join(key + b"\0" for key in self._keys.tolist()))
        digest.update(self.labels.tobytes() + self._sizes.tobytes())
        return f"{len(self)}-{digest.hexdigest()}"

    def _shard(self, index: int) -> tuple[str, Path, tuple[int, int]]:
        return self._shards[bisect_right(self._first, index) - 1]  # for one number several times faster than NumPy's


def _read(tar: Path, state: tuple[int, int], size: int, offset: int) -> bytes:
    """Raises OSError where the shard is not the file that was indexed."""
    file = _opened(tar, state).fileno()
    status = os.fstat(file)
    if (status.st_size, status.st_mtime_ns) != state:
        raise OSError(f"{tar} was changed while in use")
    return os.pread(file, size, offset)


@lru_cache(maxsize=16)  # files that a process keeps open
def _opened(tar: Path, state: tuple[int, int]) -> BinaryIO:
    return open(tar, "rb", buffering=0)
