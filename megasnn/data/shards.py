"""Shards: webdataset tars whose samples are found by one seek.

A sample is the files that share a name up to the first dot, here an image (``<key>.jpg``) or events
(``<key>.frames.npz`` or ``<key>.events.npz``) and its class (``<key>.cls``, an integer as text). Where the samples lie
is read from the index.json beside the shard; where there is none, from the tar's headers, once, and kept in the cache.
A ``.tar.gz`` has no random access: it is unpacked into the cache, once a host.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from megasnn.cache import build_once, cache_folder, cached_name
from megasnn.data.event_files import EVENTS, FRAMES
from megasnn.data.images import IMAGE_SUFFIXES
from megasnn.data.index import INDEX_NAME, Members, ShardRecord, read_index
from megasnn.files import described

LABEL = "cls"
SUFFIXES = (*IMAGE_SUFFIXES, FRAMES, EVENTS)
"""Endings of a sample's data."""
_INDEX_VERSION = "5"
_LABEL_BYTES = 32
_GZIP = b"\x1f\x8b"
_AGAIN = "copy or download it again"


@dataclass(frozen=True)
class Shard:
    """Where the samples of one shard lie, in file order.

    Attributes:
        name: the shard as the user named it, for messages.
        tar: the uncompressed file that is read.
        state: size in bytes and time of change (ns) of `tar` when it was indexed.
        keys: bytes `[n]`.
        labels: int64 `[n]`.
        offsets, sizes: int64 `[n]`, where the sample's data lie in `tar`, in bytes.
        suffixes: endings of the samples' data that occur.
    """

    name: str
    tar: Path
    state: tuple[int, int]
    keys: NDArray[np.bytes_]
    labels: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    suffixes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)


def open_shard(source: Path, name: str | None = None, record: ShardRecord | None = None) -> Shard:
    """Opens a shard.

    Args:
        source: a tar, or one packed by gzip.
        name: for messages, where that is not its path.
        record: of the index.json beside it, where that lies elsewhere; by default it is looked for in its folder.
    Raises:
        ValueError: it is cut, empty or no tar, a sample is incomplete, or it is not the one that index.json lists;
            the message names the shard, and the sample.
    """
    name, tar = name or str(source), source
    if record is None:
        record = _record_beside(source)
    if is_packed(source):
        tar = build_once(
            cache_folder("unpacked") / cached_name(source, ".tar"), lambda path: unpack(source, path, name)
        )
    status = tar.stat()
    members = record.members if record is not None and tar == source else None
    if members is None:
        target = cache_folder("index") / cached_name(tar, ".json", _INDEX_VERSION)
        build_once(target, lambda path: _write_members(path, scan(tar, name)))
        members = described(Members, target.read_bytes(), target)
    if record is not None and len(members.keys) != record.samples:
        raise ValueError(
            f"shard {name} holds {len(members.keys)} samples, {INDEX_NAME} says {record.samples}; make it again"
        )
    shard = Shard(
        name=name,
        tar=tar,
        state=(status.st_size, status.st_mtime_ns),
        keys=np.array([key.encode() for key in members.keys]),
        labels=np.array(members.labels, np.int64),
        offsets=np.array(members.offsets, np.int64),
        sizes=np.array(members.sizes, np.int64),
        suffixes=tuple(members.suffixes),
    )
    if len(shard) and int((shard.offsets + shard.sizes).max()) > status.st_size:
        raise ValueError(f"shard {name} has {status.st_size} bytes, fewer than its index says: it was cut; {_AGAIN}")
    return shard


def is_packed(path: Path) -> bool:
    """Tell whether a file begins as gzip does."""
    with open(path, "rb") as file:
        return file.read(len(_GZIP)) == _GZIP


def unpack(packed: Path, target: Path, name: str) -> None:
    """Unpacks a `.tar.gz`. Raises ValueError, naming the shard, where it is cut or damaged."""
    try:
        with gzip.open(packed) as content, open(target, "wb") as plain:
            shutil.copyfileobj(content, plain, 1 << 20)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"shard {name} is cut or damaged ({error}); {_AGAIN}") from error


def scan(tar: Path, name: str) -> Members:
    """Reads the headers and the classes of a tar.

    Args:
        name: of the shard, for messages.
    Raises:
        ValueError: it is cut, damaged, empty or no tar, or a sample is incomplete; the message names what it is.
    """
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    for member, key, suffix in _members(tar, name):
        if not member.isreg() or member.issparse():
            raise ValueError(
                f"{member.name!r} of shard {name} is a link, a device or a sparse file; pack the file itself"
            )
        files = samples.setdefault(key, {})
        if suffix in files:
            raise ValueError(f"shard {name} holds {member.name!r} twice; keys must be unique in it")
        files[suffix] = (member.offset_data, member.size)
    if not samples:
        raise ValueError(f"shard {name} holds no samples; leave it out or write it again")
    labels, places, seen = [], [], set()
    with open(tar, "rb") as file:
        for key, files in samples.items():
            data = [suffix for suffix in SUFFIXES if suffix in files]
            if len(data) != 1 or LABEL not in files:
                raise ValueError(
                    f"sample {key!r} of shard {name} has the files {', '.join(sorted(files))}; it needs a label "
                    f"({key}.{LABEL}) and exactly one of {', '.join(SUFFIXES)}"
                )
            labels.append(_label(os.pread(file.fileno(), _LABEL_BYTES, files[LABEL][0])[: files[LABEL][1]], key, name))
            places.append(files[data[0]])
            seen.add(data[0])
    return Members(list(samples), labels, [place for place, _ in places], [size for _, size in places], sorted(seen))


def _members(tar: Path, name: str) -> Iterator[tuple[tarfile.TarInfo, str, str]]:
    """The files of samples in a tar, each with its key and suffix, as webdataset splits names."""
    from webdataset.tariterators import base_plus_ext  # imports torch

    with open(tar, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    if member.offset_data + member.size > length:
                        raise tarfile.ReadError(f"member {member.name!r} ends behind byte {length}")
                    key, suffix = base_plus_ext(member.name)
                    if member.isdir() or suffix is None or suffix.lower() not in (*SUFFIXES, LABEL):
                        continue
                    if not member.name.isprintable():
                        raise tarfile.ReadError(f"the name {member.name!r} is not UTF-8, or cannot be printed")
                    yield member, key, suffix.lower()
                end = archive.offset
        except (tarfile.TarError, OverflowError, UnicodeError) as error:
            raise ValueError(f"shard {name} is cut, or is no tar file ({error}); {_AGAIN}") from error
        file.seek(end)  # a tar that is cut between two members looks whole to tarfile
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ValueError(f"shard {name} is cut at byte {end}: the end-of-archive mark is missing; {_AGAIN}")
        while block := file.read(1 << 20):
            if any(block):
                raise ValueError(
                    f"shard {name} goes on after its end mark at byte {end} (archives joined with cat?); pack it as one"
                )


def _label(text: bytes, key: str, name: str) -> int:
    try:
        label = int(text)
        if abs(label) < 2**31:
            return label
    except ValueError:
        pass
    raise ValueError(
        f"label {text!r} of sample {key!r} in shard {name} is no class number; {key}.{LABEL} must hold one"
    )


def _write_members(path: Path, members: Members) -> None:
    path.write_bytes(to_json(asdict(members)))


def _record_beside(source: Path) -> ShardRecord | None:
    """What the index.json beside a shard says of it, where there is one that lists it; its size is compared."""
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
