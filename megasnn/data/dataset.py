"""Random access to the samples of a list of shards."""

from __future__ import annotations

import hashlib
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from megasnn.data.formats import Decoder, FormatMismatch
from megasnn.data.remote.shard import RemoteShard
from megasnn.data.shards import Shard
from megasnn.files.sample_size import too_large

_OPEN_SHARDS = 16  # files that one reading thread keeps open
Format = TypeVar("Format", bound=Decoder)
_UNKNOWN, _SOUND, _BROKEN = 0, 1, 2


class BrokenSample(ValueError):
    """A sample whose data cannot be decoded."""


class ShardDataset(Generic[Format]):
    """The samples of `shards`, one shard after the other, decoded by `format`; threads and other processes may read.

    Raises:
        ValueError: a label outside [0, num_classes). All are looked at here, before anything is trained.
    """

    def __init__(self, shards: Sequence[Shard], format: Format, num_classes: int) -> None:
        self.format = format
        self._shards = list(shards)
        self._first = np.cumsum([0] + [len(shard) for shard in shards])
        self._sizes = np.concatenate([shard.sizes for shard in shards])
        self.labels = np.concatenate([shard.labels for shard in shards])
        self._state = np.zeros(len(self.labels), dtype=np.uint8)
        self._files = _OpenFiles()
        self._check_labels(num_classes)

    def __len__(self) -> int:
        return len(self.labels)

    def key(self, index: int) -> str:
        """The name of a sample inside its shard."""
        shard, place = self._locate(index)
        return shard.keys[place].decode()

    def describe(self, index: int) -> str:
        """A sample as an error message names it."""
        shard, place = self._locate(index)
        return f"sample {shard.keys[place].decode()!r} of shard {shard.source}"

    def sample(self, index: int, decode: Callable[[bytes], np.ndarray] | None = None) -> np.ndarray:
        """The decoded sample: an image as uint8 `[H, W, C]`, event frames `[T, 2, H, W]`.

        Args:
            decode: takes the place of the format's.
        Raises:
            BrokenSample: it cannot be decoded, or is too large.
            ValueError: it does not fit the model, or the shard was changed or cut after it was indexed.
        """
        if problem := too_large("its file", int(self._sizes[index]), self.format.limit):
            raise self._broken(index, f"cannot be decoded: {problem}")
        data = self._read(index)
        try:
            sample = (decode or self.format.decode)(data)
        except FormatMismatch as error:
            raise ValueError(f"{self.describe(index)} {error}") from error
        except ValueError as error:
            raise self._broken(index, error) from error
        self._state[index] = _SOUND
        return sample

    def decodes(self, index: int) -> bool:
        """Whether `sample(index)` succeeds. Found out by decoding, once for each sample and process."""
        if self._state[index] == _UNKNOWN:
            try:
                self.sample(index)
            except BrokenSample:
                return False
        return bool(self._state[index] == _SOUND)

    @property
    def fetch_ahead(self) -> int:
        """How many shards are to be fetched at a time before they are needed; 0 where all are files of the user's."""
        return max((shard.remote.options.ahead for shard in self._shards if shard.remote is not None), default=0)

    def remote_shards(self, samples: Sequence[int]) -> Iterator[RemoteShard]:
        """The shards behind URLs that hold these samples, each once, in the order of their first use."""
        for number in dict.fromkeys((np.searchsorted(self._first, samples, side="right") - 1).tolist()):
            if (remote := self._shards[number].remote) is not None:
                yield remote

    def fingerprint(self) -> str:
        """A hash of the samples' names, classes and data sizes in file order.

        It tells data sets apart without reading them, and is the same wherever they lie, packed or unpacked.
        """
        digest = hashlib.blake2b(digest_size=16)
        for shard in self._shards:
            digest.update(b"".join(key + b"\0" for key in shard.keys.tolist()))
        digest.update(self.labels.tobytes())
        digest.update(self._sizes.tobytes())
        return f"{len(self)}-{digest.hexdigest()}"

    def _broken(self, index: int, problem: object) -> BrokenSample:
        self._state[index] = _BROKEN
        return BrokenSample(f"{self.describe(index)} {problem}; mend it, or train without it (--skip-broken-samples)")

    def _locate(self, index: int) -> tuple[Shard, int]:
        shard = bisect_right(self._first, index) - 1  # for one number several times faster than NumPy's
        return self._shards[shard], index - int(self._first[shard])

    def _read(self, index: int) -> bytes:
        shard, place = self._locate(index)
        size = int(shard.sizes[place])
        data = os.pread(self._files.descriptor(shard), size, int(shard.offsets[place]))
        if len(data) < size:
            raise ValueError(f"{self.describe(index)} ends early: {shard.tar} was changed while in use")
        return data

    def _check_labels(self, num_classes: int) -> None:
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= num_classes))
        if len(wrong):
            raise ValueError(
                f"{len(wrong)} of {len(self)} labels are outside 0..{num_classes - 1}, the first one "
                f"{self.labels[wrong[0]]} of {self.describe(int(wrong[0]))}, largest {self.labels.max()}; "
                f"raise --num-classes (now {num_classes}) or mend the data"
            )


class _OpenFiles(threading.local):
    """The shards that this thread has open, the least recently used closed first."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, _Descriptor] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process opens its own."""
        return _OpenFiles, ()

    def descriptor(self, shard: Shard) -> int:
        path = str(shard.tar)
        file = self._open.pop(path, None) or _Descriptor(shard)
        self._open[path] = file
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)
        return file.number


class _Descriptor:
    """A file descriptor for reading that is closed with the object, thus also when its thread ends."""

    def __init__(self, shard: Shard) -> None:
        self._file = shard.open()
        self.number = self._file.fileno()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()
