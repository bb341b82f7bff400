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
import os
import shutil
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from webdataset.tariterators import base_plus_ext

from megasnn.data.cache import build_once, cache_folder, cached_name
from megasnn.data.images import IMAGE_SUFFIXES
from megasnn.preprocess.event_files import FRAMES, decode_sample
from megasnn.preprocess.index import INDEX_NAME, ShardRecord, read_index, require_finished

LABEL_SUFFIX = "cls"
_INDEX_VERSION = "2"
_TRIES = 10
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


def open_shard(source: Path, suffixes: tuple[str, ...] = IMAGE_SUFFIXES) -> Shard:
    """The index of a shard, from the cache or by scanning; `suffixes` are the endings of a sample's data.

    Raises:
        ValueError: the shard is cut, empty or no tar, a sample incomplete, or the shard not the one that the index.json
            beside it lists, or that is not finished; the message names it.
    """
    record = _record_of(source)
    tar = source if source.suffix == ".tar" else _unpacked(source)
    target = cache_folder() / "index" / cached_name(tar, ".npz", _INDEX_VERSION, *suffixes)
    build_once(target, lambda path: _save_index(path, _scan(tar, source, suffixes)))
    columns = _load_index(target) or _scan(tar, source, suffixes)
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


def _unpacked(source: Path) -> Path:
    """The uncompressed copy of a `.tar.gz` in the cache folder."""

    def unpack(path: Path) -> None:
        try:
            with gzip.open(source, "rb") as packed, open(path, "wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"shard {source} is cut or damaged ({error}); download it again") from error

    return build_once(cache_folder() / "unpacked" / cached_name(source, ".tar"), unpack)


def _scan(tar: Path, source: Path, suffixes: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Read all headers of a tar and the label files; returns the columns of `Shard`."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with open(tar, "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                key, suffix = base_plus_ext(member.name) if member.isreg() else (None, None)
                if key is None or suffix is None:
                    continue
                files = samples.setdefault(key, {})
                if suffix.lower() in files:
                    raise ValueError(f"shard {source} holds {member.name!r} twice; keys must be unique in it")
                files[suffix.lower()] = (member.offset_data, member.size)
            _check_end(file, archive.offset, source)
            return _columns(file, samples, source, suffixes)
    except tarfile.TarError as error:
        raise ValueError(f"shard {source} is cut or is not a tar file ({error}); copy or download it again") from error


def _check_end(file: BinaryIO, offset: int, source: Path) -> None:
    """Look for the zeros that end a tar: one cut between two members looks whole to tarfile."""
    file.seek(offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise ValueError(
            f"shard {source} is cut or damaged at byte {offset}: the end-of-archive mark is missing; "
            f"copy or download it again"
        )
    while block := file.read(1 << 20):
        if any(block):
            raise ValueError(
                f"shard {source} goes on after its end mark at byte {offset} (archives joined with cat?); "
                f"those samples would be lost: pack it as one archive"
            )


def _columns(
    file: BinaryIO, samples: dict[str, dict[str, tuple[int, int]]], source: Path, suffixes: tuple[str, ...]
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
        "frames": np.array(_frames_shape(file, places) if FRAMES in seen else (), dtype=np.int64),
    }


def _frames_shape(file: BinaryIO, places: list[tuple[int, int]]) -> tuple[int, ...]:
    """The shape of the first sample that can be decoded, of a few; () where none can."""
    for offset, size in places[:_TRIES]:
        with contextlib.suppress(ValueError):
            sample = decode_sample(os.pread(file.fileno(), size, offset))
            if isinstance(sample, np.ndarray):
                return sample.shape
    return ()


def _label(file: BinaryIO, place: tuple[int, int], key: str, source: Path) -> int:
    offset, size = place
    text = os.pread(file.fileno(), min(size, 32), offset)
    try:
        label = int(text.decode("ascii"))
        if abs(label) >= 2**31:
            raise ValueError
        return label
    except ValueError:
        raise ValueError(
            f"label {text!r} of sample {key!r} in shard {source} is not a class number; "
            f"{key}.{LABEL_SUFFIX} must hold an integer as text"
        ) from None


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
