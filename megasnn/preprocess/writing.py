"""Writes shards, and what is kept of them: aside, to disk, then in place, so that a file is whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megasnn.files.durable import sync, write_whole

PARTIAL = ".partial"
Sample = tuple[str, Mapping[str, bytes]]
"""Key, and the contents of its files by suffix."""
_BUFFER = 1 << 20


class _Output(io.FileIO):
    """The file of a shard while it is written; counts and hashes all that passes.

    Raises:
        ValueError: the file cannot be written (disk full, no right); the message names `path`, which it is to become.
    """

    def __init__(self, partial: Path, path: Path) -> None:
        self._path, self.digest, self.size = path, hashlib.sha256(), 0
        with _named(f"shard {path}"):
            super().__init__(partial, "w", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))

    def write(self, data: Any) -> int:
        with _named(f"shard {self._path}"):
            written = super().write(data)  # a disk that is nearly full takes a part
        self.digest.update(memoryview(data)[:written])
        self.size += written
        return written

    def to_disk(self) -> None:
        with _named(f"shard {self._path}"):
            os.fsync(self.fileno())


def write_shard(path: Path, samples: Iterable[Sample]) -> tuple[int, int, str]:
    """Write a shard whose bytes depend on `samples` only; returns the number of samples, the size and the sha256.

    Neither the shard nor a part of it is left when something goes wrong, here or in `samples`.

    Raises:
        ValueError: it cannot be written (disk full, no right); the message names it.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with _Output(partial, path) as output:
            count = _fill(output, samples)
            output.to_disk()
        with _named(f"shard {path}"):
            os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    with contextlib.suppress(OSError):  # not every file system brings a name to disk
        sync(path.parent)
    return count, output.size, output.digest.hexdigest()


def _fill(output: _Output, samples: Iterable[Sample]) -> int:
    from webdataset import TarWriter  # imports torch: not where nothing is written

    count = 0
    buffer = io.BufferedWriter(output, _BUFFER)
    # Owner, rights and time of change are the same everywhere and always.
    with TarWriter(buffer, user="", group="", mode=0o644, mtime=0, encoder=False, compress=False) as archive:
        for key, files in samples:
            archive.write({"__key__": key, **files})
            count += 1
    buffer.detach()  # writes what is left, and leaves the file open
    return count


def write_json(path: Path, content: object) -> None:
    """Writes a file that is complete or not there, also after a power cut.

    Raises:
        ValueError: it cannot be written (disk full, no right); the message names it.
    """
    with _named(path):
        write_whole(path, json.dumps(content, indent=1))


@contextlib.contextmanager
def _named(path: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror or error}; the shards that are finished stay, and the same command "
            f"goes on from there"
        ) from error
