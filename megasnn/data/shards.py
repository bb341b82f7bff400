"""An index over a webdataset shard, so that any sample can be read by one seek.

A shard is a tar of samples: the files that share a name up to the first dot, here an image (``<key>.jpg``) or
events (``<key>.frames.npz`` or ``<key>.events.npz``) and its class (``<key>.cls``, an integer as text). The tar
headers are scanned once; the index is kept in the cache folder under the shard's path, size and time of change.

Where megasnn-preprocess-data made the shard, its own index.json lies beside it; the two must agree.

A ``.tar.gz`` has no random access. It is unpacked once into the cache folder, which takes its uncompressed
size there (one copy for a shard, shared by all ranks of a node); training on data too large for that wants
plain ``.tar``. A shard behind a URL is fetched into the cache (`megasnn.data.remote`); its index stays when its copy is
removed there.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megasnn.cache import build_once, cache_folder, cached_name
from megasnn.data.event_files import FRAMES, decode_sample
from megasnn.data.images import IMAGE_SUFFIXES
from megasnn.data.index import INDEX_NAME, ShardRecord, read_index, require_finished
from megasnn.data.remote.shard import RemoteShard
from megasnn.data.tar_members import tar_members
from megasnn.data.unpacking import unpack
from megasnn.files.described import open_regular
from megasnn.files.sample_size import SAMPLE_BYTES, require_size

LABEL_SUFFIX = "cls"
_INDEX_VERSION = "4"
_TRIES = 10
_LABEL_BYTES = 32
_COLUMNS = ("keys", "labels", "offsets", "sizes", "suffixes", "frames", "length")
_Columns = dict[str, np.ndarray]
"""Those of `Shard` that are kept, by name."""


@dataclass(frozen=True)
class Shard:
    """Where the samples of one shard lie, in file order.

    source: the shard as the user named it, for messages.
    tar: the uncompressed file that is read.
    length: int64 scalar, bytes of `tar`.
    remote: where `tar` comes from when the cache has removed it; None for a file of the user's.
    keys: bytes `[n]`.
    labels: int64 `[n]`.
    offsets, sizes: int64 `[n]`, where the sample's data lies in `tar`, in bytes.
    suffixes: bytes; endings of the samples' data that occur.
    frames: int64; shape `[T, 2, H, W]` of a sample of finished event frames, empty where there are none.
    """

    source: Path | str
    tar: Path
    keys: np.ndarray
    labels: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    suffixes: np.ndarray
    frames: np.ndarray
    length: np.ndarray
    remote: RemoteShard | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def open(self) -> io.FileIO:
        """The file that is read, fetched again where it has to be.

        Raises:
            OSError: it cannot be opened. ValueError: as `RemoteShard.open`.
        """
        return open_regular(self.tar) if self.remote is None else self.remote.open(int(self.length))


def open_shard(
    source: Path,
    suffixes: tuple[str, ...] = IMAGE_SUFFIXES,
    limit: int = SAMPLE_BYTES,
    unpacked_limit: int | None = None,
) -> Shard:
    """The index of a shard, from the cache or by scanning.

    Args:
        suffixes: the endings of a sample's data.
        limit: bytes that a sample may take, in its file or decoded; here it says which ones are looked at for the
            shape of frames.
        unpacked_limit: bytes that a `.tar.gz` may unpack to; by default 100 times its own, and 256 MB at least.

    Raises:
        ValueError: the shard is cut, empty or no tar, a sample incomplete, or the shard not the one that the index.json
            beside it lists, or that is not finished; the message names it.
    """
    record = _record_of(source)
    tar = source if source.suffix == ".tar" else _unpacked(source, unpacked_limit)
    target = cache_folder("index") / cached_name(tar, ".npz", _INDEX_VERSION, str(limit), *suffixes)

    def scan() -> _Columns:
        with open_regular(tar) as file:
            return _scan(file, source, suffixes, limit)

    build_once(target, lambda path: _save_index(path, scan()), lasting=False)
    columns = _load_index(target) or scan()
    _require_samples(source, columns, record)
    return Shard(source=source, tar=tar, remote=None, **columns)


def open_remote_shard(
    remote: RemoteShard, suffixes: tuple[str, ...], limit: int, provide: Callable[[RemoteShard], object]
) -> Shard:
    """The index of a shard behind a URL; it is fetched only where that is not in the cache.

    Args:
        suffixes, limit: as of `open_shard`.
        provide: fetches it.
    Raises:
        ValueError: as `open_shard`; it cannot be fetched.
    """
    target = index_of_remote(remote, suffixes, limit)

    def scan() -> _Columns:
        with remote.open() as file:
            try:
                return _scan(file, remote.name, suffixes, limit)
            except ValueError:
                remote.discard()
                raise

    if not target.exists():
        provide(remote)  # first, because others do not wait long for an index
    build_once(target, lambda path: _save_index(path, scan()))  # without it a shard would be fetched to be indexed
    columns = _load_index(target)
    if columns is None or _has_changed(remote.tar, columns):
        columns = scan()
    _require_samples(remote.name, columns, remote.record)
    return Shard(source=remote.name, tar=remote.tar, remote=remote, **columns)


def index_of_remote(remote: RemoteShard, suffixes: tuple[str, ...], limit: int) -> Path:
    """Where the index of a shard behind a URL lies, or will lie."""
    return cache_folder("index") / remote.cached_name(".npz", _INDEX_VERSION, str(limit), *suffixes)


def _has_changed(tar: Path, columns: _Columns) -> bool:
    """Whether the copy in the cache is another one than the one that was indexed."""
    with contextlib.suppress(FileNotFoundError):
        return tar.stat().st_size != int(columns["length"])
    return False


def _require_samples(source: Path | str, columns: _Columns, record: ShardRecord | None) -> None:
    """Raises ValueError for another number of samples than index.json says."""
    if record is not None and len(columns["labels"]) != record.samples:
        raise ValueError(
            f"shard {source} holds {len(columns['labels'])} samples, {INDEX_NAME} beside it says {record.samples}; "
            f"make the shards again"
        )


def _record_of(source: Path) -> ShardRecord | None:
    """What index.json says of a shard, where there is one that lists it; its size is compared here."""
    require_finished(source.parent)
    index = source.parent / INDEX_NAME
    if not index.exists():
        return None
    record = _records(source.parent, index.stat().st_mtime_ns).get(source.name)
    if record is not None and source.stat().st_size != record.size:
        raise ValueError(
            f"shard {source} has {source.stat().st_size} bytes, {INDEX_NAME} beside it says {record.size}: it was cut "
            f"or changed; make it again (megasnn-preprocess-data verify finds all such shards)"
        )
    return record


@lru_cache(maxsize=8)
def _records(folder: Path, changed: int) -> dict[str, ShardRecord]:
    """What the index.json of a folder lists, by file name; read once for all its shards, and again when it changes."""
    index = read_index(folder)
    return {record.file: record for record in index.shards} if index else {}


def _unpacked(source: Path, limit: int | None) -> Path:
    """The uncompressed copy of a `.tar.gz` in the cache folder."""
    target = cache_folder("unpacked") / cached_name(source, ".tar")
    return build_once(target, lambda path: unpack(source, path, source, limit))


def _scan(raw: io.FileIO, source: Path | str, suffixes: tuple[str, ...], limit: int) -> _Columns:
    """Read all headers of a tar and the label files; returns the columns of `Shard`."""
    from webdataset.tariterators import base_plus_ext  # imports torch, which the processes that read do without

    samples: dict[str, dict[str, tuple[int, int]]] = {}
    with io.BufferedReader(raw) as file:
        for member in tar_members(file, source):
            key, suffix = base_plus_ext(member.name)
            if key is None or suffix is None:
                continue
            suffix = suffix.lower()
            if not member.plain and suffix in (*suffixes, LABEL_SUFFIX):
                raise ValueError(
                    f"{member.name!r} of shard {source} is a link, a device or a sparse file; pack the file itself"
                )
            files = samples.setdefault(key, {})
            if suffix in files:
                raise ValueError(f"shard {source} holds {member.name!r} twice; keys must be unique in it")
            files[suffix] = (member.offset, member.size)
        return _columns(file, samples, source, suffixes, limit)


def _columns(
    file: BinaryIO,
    samples: dict[str, dict[str, tuple[int, int]]],
    source: Path | str,
    suffixes: tuple[str, ...],
    limit: int,
) -> _Columns:
    if not samples:
        raise ValueError(f"shard {source} holds no samples; leave it out or write it again")
    labels, places, seen = [], [], set()
    for key, files in samples.items():
        data = [suffix for suffix in suffixes if suffix in files]
        if len(data) != 1 or LABEL_SUFFIX not in files:
            raise ValueError(
                f"sample {key!r} of shard {source} has the files {', '.join(sorted(files))}; it needs a "
                f"label ({key}.{LABEL_SUFFIX}) and exactly one of {', '.join(suffixes)}"
            )
        labels.append(_label(file, files[LABEL_SUFFIX], key, source))
        places.append(files[data[0]])
        seen.add(data[0])
    table = np.array(places, dtype=np.int64)
    return {
        "keys": np.array([key.encode() for key in samples]),
        "labels": np.array(labels, dtype=np.int64),
        "offsets": table[:, 0],
        "sizes": table[:, 1],
        "suffixes": np.array(sorted(seen), dtype=np.bytes_),
        "frames": np.array(_frames_shape(file, places, limit) if FRAMES in seen else (), dtype=np.int64),
        "length": np.array(os.fstat(file.fileno()).st_size, dtype=np.int64),
    }


def _frames_shape(file: BinaryIO, places: list[tuple[int, int]], limit: int) -> tuple[int, ...]:
    """The shape of the first sample that can be decoded, of a few; () where none can."""
    for offset, size in places[:_TRIES]:
        with contextlib.suppress(ValueError):
            require_size("its file", size, limit)
            sample = decode_sample(os.pread(file.fileno(), size, offset), limit)
            if isinstance(sample, np.ndarray):
                return sample.shape
    return ()


def _label(file: BinaryIO, place: tuple[int, int], key: str, source: Path | str) -> int:
    offset, size = place
    text = os.pread(file.fileno(), min(size, _LABEL_BYTES + 1), offset)
    if len(text) <= _LABEL_BYTES and re.fullmatch(rb"\s*[+-]?\d+\s*", text) and abs(label := int(text)) < 2**31:
        return label
    raise ValueError(
        f"label {text!r} of sample {key!r} in shard {source} is not a class number; "
        f"{key}.{LABEL_SUFFIX} must hold an integer as text"
    )


def _save_index(path: Path, columns: _Columns) -> None:
    with open(path, "wb") as file:
        np.savez(file, **columns)  # type: ignore[arg-type]


def _load_index(path: Path) -> _Columns | None:
    """The columns of a cached index, or None where it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in _COLUMNS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
