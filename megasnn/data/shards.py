"""An index over a webdataset shard, so that any sample can be read by one seek.

A shard is a tar of samples: the files that share a name up to the first dot, here an image (``<key>.jpg``) or
events (``<key>.frames.npz`` or ``<key>.events.npz``) and its class (``<key>.cls``, an integer as text). The tar
headers are scanned once; the index is kept in the cache folder under the shard's path, size and time of change.

Where tools/preprocess_data.py made the shard, its own index.json lies beside it; the two must agree.

A ``.tar.gz`` has no random access. It is unpacked once into the cache folder, which takes its uncompressed
size there (one copy for a shard, shared by all ranks of a node); training on data too large for that wants
plain ``.tar``.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megasnn.cache import build_once, cache_folder, cached_name
from megasnn.cache.room import LIMIT, cache_limit
from megasnn.data.event_files import FRAMES, decode_sample
from megasnn.data.images import IMAGE_SUFFIXES
from megasnn.data.index import INDEX_NAME, ShardRecord, read_index, require_finished
from megasnn.data.tar_members import tar_members
from megasnn.files.described import open_regular
from megasnn.files.sample_size import SAMPLE_BYTES, require_size

LABEL_SUFFIX = "cls"
_INDEX_VERSION = "3"
_TRIES = 10
_LABEL_BYTES = 32
_BLOCK = 1 << 20
# An image or a recording packs to a tenth; headers of small files to a thirtieth.
_UNPACKED_MOST, _UNPACKED_LEAST = 100, 256 << 20
_COLUMNS = ("keys", "labels", "offsets", "sizes", "suffixes", "frames")


@dataclass(frozen=True)
class Shard:
    """Where the samples of one shard lie, in file order.

    source: the shard as the user named it, for messages.
    tar: the uncompressed file that is read.
    keys: bytes `[n]`.
    labels: int64 `[n]`.
    offsets, sizes: int64 `[n]`, where the sample's data lies in `tar`, in bytes.
    suffixes: bytes; endings of the samples' data that occur.
    frames: int64; shape `[T, 2, H, W]` of a sample of finished event frames, empty where there are none.
    """

    source: Path
    tar: Path
    keys: np.ndarray
    labels: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    suffixes: np.ndarray
    frames: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


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
    build_once(target, lambda path: _save_index(path, _scan(tar, source, suffixes, limit)), lasting=False)
    columns = _load_index(target) or _scan(tar, source, suffixes, limit)
    if record is not None and len(columns["labels"]) != record.samples:
        raise ValueError(
            f"shard {source} holds {len(columns['labels'])} samples, {INDEX_NAME} beside it says {record.samples}; "
            f"make the shards again"
        )
    return Shard(source=source, tar=tar, **columns)


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
            f"or changed; make it again (tools/preprocess_data.py verify finds all such shards)"
        )
    return record


@lru_cache(maxsize=8)
def _records(folder: Path, changed: int) -> dict[str, ShardRecord]:
    """What the index.json of a folder lists, by file name; read once for all its shards, and again when it changes."""
    index = read_index(folder)
    return {record.file: record for record in index.shards} if index else {}


def _unpacked(source: Path, limit: int | None) -> Path:
    """The uncompressed copy of a `.tar.gz` in the cache folder."""
    if limit is None:
        limit = max(_UNPACKED_LEAST, _UNPACKED_MOST * source.stat().st_size)

    def unpack(path: Path) -> None:
        left = min(limit, cache_limit())
        try:
            with open_regular(source) as file, gzip.GzipFile(fileobj=file) as packed, open(path, "wb") as plain:
                while block := packed.read(_BLOCK):
                    left -= len(block)
                    if left < 0:
                        raise ValueError(_too_much(source, limit))
                    plain.write(block)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"shard {source} is cut or damaged ({error}); download it again") from error

    return build_once(cache_folder("unpacked") / cached_name(source, ".tar"), unpack)


def _too_much(source: Path, limit: int) -> str:
    size = source.stat().st_size
    if cache_limit() < limit:
        return f"shard {source} of {size} bytes unpacks to more than the cache may hold; raise {LIMIT}"
    return (
        f"shard {source} of {size} bytes unpacks to more than {limit / 1e9:.3g} GB; if it is sound, raise "
        f"--max-unpacked-gb, or unpack it yourself"
    )


def _scan(tar: Path, source: Path, suffixes: tuple[str, ...], limit: int) -> dict[str, np.ndarray]:
    """Read all headers of a tar and the label files; returns the columns of `Shard`."""
    from webdataset.tariterators import base_plus_ext  # imports torch, which the processes that read do without

    samples: dict[str, dict[str, tuple[int, int]]] = {}
    with open_regular(tar) as raw, io.BufferedReader(raw) as file:
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
    file: BinaryIO, samples: dict[str, dict[str, tuple[int, int]]], source: Path, suffixes: tuple[str, ...], limit: int
) -> dict[str, np.ndarray]:
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


def _label(file: BinaryIO, place: tuple[int, int], key: str, source: Path) -> int:
    offset, size = place
    text = os.pread(file.fileno(), min(size, _LABEL_BYTES + 1), offset)
    if len(text) <= _LABEL_BYTES and re.fullmatch(rb"\s*[+-]?\d+\s*", text) and abs(label := int(text)) < 2**31:
        return label
    raise ValueError(
        f"label {text!r} of sample {key!r} in shard {source} is not a class number; "
        f"{key}.{LABEL_SUFFIX} must hold an integer as text"
    )


def _save_index(path: Path, columns: dict[str, np.ndarray]) -> None:
    with open(path, "wb") as file:
        np.savez(file, **columns)  # type: ignore[arg-type]


def _load_index(path: Path) -> dict[str, np.ndarray] | None:
    """The columns of a cached index, or None where it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in _COLUMNS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
