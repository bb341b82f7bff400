"""Shards: webdataset tars whose samples are found by one seek, and their index.json.

A sample is the files that share a name up to the first dot, here an image (``<key>.jpg``) or events
(``<key>.frames.npz`` or ``<key>.events.npz``) and its class (``<key>.cls``, an integer as text), or arrays for a model
with its own inputs or target (``<key>.npy``, ``<key>.mask.npy``, ``<key>.seg.png``). Offsets come from the index.json
beside the shard; where there is none, from the tar's headers, read once and kept in the cache.
A ``.tar.gz`` has no random access: it is unpacked into the cache, once a host.

index.json names the contents of a folder of shards. It is written last: a folder without it is not finished.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, with_config
from pydantic_core import to_json

from megasnn.common.files import (
    NAME_BYTES,
    STRICT,
    StoredCount,
    build_once,
    cache_folder,
    cached_name,
    described,
    read_regular,
)
from megasnn.data.formats import EVENTS, FRAMES
from megasnn.data.images import IMAGE_SUFFIXES

INDEX_NAME = "index.json"
VERSION: Literal[1] = 1
_ADVICE = "make the shards again, or remove it"
LABEL = "cls"
SAMPLE_SUFFIXES = (*IMAGE_SUFFIXES, FRAMES, EVENTS)
"""Endings of a sample's data."""
_INDEX_VERSION = "8"
_LABEL_BYTES = 32
_AGAIN = "copy or download it again"
FileState = tuple[int, int, int]


@with_config(STRICT)
@dataclass(frozen=True)
class Members:
    """Samples of a shard in file order: keys and classes, and offsets and sizes of their data in the tar, in bytes.

    Attributes:
        suffixes: endings of the samples' data that occur.
        starts, ends: of all files of each sample, where these lie side by side; otherwise, and in old folders, empty.
    """

    keys: list[Annotated[str, Field(max_length=NAME_BYTES)]]
    labels: list[int]
    offsets: list[StoredCount]
    sizes: list[StoredCount]
    suffixes: list[str]
    starts: list[StoredCount] = field(default_factory=list)
    ends: list[StoredCount] = field(default_factory=list)

    def __post_init__(self) -> None:
        lengths = {len(each) for each in (self.keys, self.labels, self.offsets, self.sizes)}
        lengths |= {len(each) for each in (self.starts, self.ends) if each or self.starts}
        if len(lengths) > 1:
            raise ValueError(f"lists of one shard have different lengths, {sorted(lengths)}")


@with_config(STRICT)
@dataclass(frozen=True)
class ShardRecord:
    """A shard: file name, split, size in bytes, samples, and the sources left out."""

    file: Annotated[str, Field(pattern="^[^/]+$")]
    split: str
    size: StoredCount
    broken: list[str]
    members: Members

    def __post_init__(self) -> None:
        ends = [offset + size for offset, size in zip(self.members.offsets, self.members.sizes, strict=True)]
        if max(ends, default=0) > self.size or max(self.members.ends, default=0) > self.size:
            raise ValueError(f"a sample ends behind the {self.size} bytes of {self.file}")


@with_config(STRICT)
@dataclass(frozen=True)
class Index:
    """A folder of shards: class names by number, shards, version."""

    classes: list[str]
    shards: list[ShardRecord]
    version: Literal[1] = VERSION

    def of_split(self, split: str) -> list[ShardRecord]:
        return [shard for shard in self.shards if shard.split == split]


def read_index(folder: Path) -> Index | None:
    """Index of a folder of shards; None where there is none. Raises ValueError, naming the first wrong field."""
    path = folder / INDEX_NAME
    return described(Index, read_regular(path), path, advice=_ADVICE) if path.exists() else None


@dataclass(frozen=True)
class TarFile:
    """A shard that can be read.

    Attributes:
        name: as the user named it, for messages.
        state: of `tar` when it was indexed, see `file_state`.
        classes: names by number, from the index.json beside it; empty where there is none.
    """

    name: str
    tar: Path
    state: FileState
    members: Members
    classes: tuple[str, ...] = ()


def file_state(status: os.stat_result) -> FileState:
    """Size, time of change (ns) and inode of a file: another file in its place, or a change, has others."""
    return status.st_size, status.st_mtime_ns, status.st_ino


def open_shard(source: Path, name: str | None = None) -> TarFile:
    """Opens a tar, or one packed by gzip; messages call it `name`, by default its path.

    Raises ValueError, as `scan`, and where it is not the one that index.json lists.
    """
    name, tar = name or str(source), source
    record, classes = _record_beside(source)
    state = file_state(source.stat())
    if _is_packed(source):
        tar = cache_folder("unpacked") / cached_name(source, ".tar")
        build_once(tar, lambda path: _unpack(source, path, name))
        state = file_state(tar.stat())
    elif record is not None and _is_older(source):
        return TarFile(name, tar, state, record.members, classes)
    target = cache_folder("index") / cached_name(tar, ".json", _INDEX_VERSION)
    build_once(target, lambda path: path.write_bytes(to_json(asdict(scan(tar, name)))))
    members = described(Members, target.read_bytes(), target)
    if record is not None and tar == source and not _agree(members, record.members):
        raise ValueError(
            f"shard {name} was changed after {INDEX_NAME} beside it was written, and holds other samples or classes "
            f"than that says; make the folder again, or remove {INDEX_NAME}"
        )
    return TarFile(name, tar, state, members, classes)


def scan(tar: Path, name: str) -> Members:
    """Reads the headers and the classes of a tar.

    Raises ValueError where it is cut, damaged, empty or no tar, or a sample is incomplete; names shard and sample.
    """
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    for member, key, suffix in _members(tar, name):
        _check_member(member, key, name)
        if suffix in samples.setdefault(key, {}):
            raise ValueError(f"shard {name} holds {member.name!r} twice; keys must be unique in it")
        samples[key][suffix] = member
    if not samples:
        raise ValueError(f"shard {name} holds no samples; leave it out or write it again")
    labels, data, seen = [], [], set()
    starts, ends = [], []
    with open(tar, "rb") as file:
        for key, files in samples.items():
            found = [suffix for suffix in SAMPLE_SUFFIXES if suffix in files]
            arrays = [suffix for suffix in files if _is_array(suffix)]
            if (len(found) != 1 or LABEL not in files) and not arrays:
                raise ValueError(
                    f"sample {key!r} of shard {name} has the files {', '.join(sorted(files))}; it needs a label "
                    f"({key}.{LABEL}) and exactly one of {', '.join(SAMPLE_SUFFIXES)}"
                )
            labels.append(_label(file.fileno(), files[LABEL], name) if LABEL in files else -1)
            first = (found or arrays)[0]
            data.append(files[first])
            seen.add(first)
            starts.append(min(each.offset for each in files.values()))
            ends.append(max(each.offset_data + each.size for each in files.values()))
    offsets, sizes = [each.offset_data for each in data], [each.size for each in data]
    if any(start < end for start, end in zip(starts[1:], ends, strict=False)):  # between the files of another sample
        starts, ends = [], []
    return Members(list(samples), labels, offsets, sizes, sorted(seen), starts, ends)


def _is_array(suffix: str) -> bool:
    return suffix == "npy" or suffix.endswith((".npy", ".png"))


def split_name(name: str) -> tuple[str, str]:
    """Key and ending of a file's name, as webdataset splits it; the ending of a file of no sample is empty."""
    from webdataset.tariterators import base_plus_ext  # imports torch

    key, suffix = base_plus_ext(name)
    return key or "", (suffix or "").lower()


def _members(tar: Path, name: str) -> Iterator[tuple[tarfile.TarInfo, str, str]]:
    """Files of samples in a tar, each with its key and suffix, as webdataset splits names."""
    length = tar.stat().st_size
    try:
        with tarfile.open(tar, mode="r:") as archive:
            for member in archive:
                is_stored_whole = not member.issparse()  # a sparse one's size counts its holes; it is refused by name
                if is_stored_whole and member.offset_data + member.size > length:
                    raise tarfile.ReadError(f"member {member.name!r} ends behind byte {length}")
                key, suffix = split_name(member.name)
                if not member.isreg() or not (suffix in (*SAMPLE_SUFFIXES, LABEL) or _is_array(suffix)):
                    continue
                yield member, key, suffix
            end = archive.offset
    except (tarfile.TarError, OverflowError, ValueError) as error:
        raise ValueError(f"shard {name} is cut, packed, or no tar file ({error}); {_AGAIN}, or gunzip it") from error
    # A tar that is cut between two members looks whole to tarfile, and so does the first of two that were joined.
    with open(tar, "rb") as file:
        file.seek(end)
        rest = file.read(1 << 20)
    if len(rest) < tarfile.BLOCKSIZE or any(rest):
        raise ValueError(f"shard {name} has no end mark at byte {end}: it was cut, or joined to another; {_AGAIN}")


def _check_member(member: tarfile.TarInfo, key: str, name: str) -> None:
    """Raises ValueError for a file whose name, or whose content by one seek, is not what it seems."""
    if not member.name.isprintable():
        raise ValueError(f"shard {name}: the name {member.name[:NAME_BYTES]!r} is not UTF-8; rename it")
    if len(os.fsencode(key)) > NAME_BYTES:
        raise ValueError(f"shard {name}: the name {key[:40]!r}... has more than {NAME_BYTES} bytes; shorten it")
    if member.issparse():  # its bytes are not those of the file: holes are left out
        raise ValueError(f"shard {name}: {member.name!r} is stored as a sparse file; pack it without tar's --sparse")


def _label(file: int, member: tarfile.TarInfo, name: str) -> int:
    text = os.pread(file, min(member.size, _LABEL_BYTES + 1), member.offset_data)
    number = int(text) if len(text) <= _LABEL_BYTES and re.fullmatch(rb"\s*[+-]?[0-9]+\s*", text) else None
    if number is None or not -(1 << 31) <= number < 1 << 31:
        raise ValueError(f"{member.name} in shard {name} holds {text!r}; it must hold a class number alone")
    return number


def _is_packed(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"  # gzip


def _unpack(packed: Path, target: Path, name: str) -> None:
    try:
        with gzip.open(packed) as content, open(target, "wb") as plain:
            shutil.copyfileobj(content, plain, 1 << 20)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"shard {name} is cut or damaged ({error}); {_AGAIN}") from error


def _record_beside(source: Path) -> tuple[ShardRecord | None, tuple[str, ...]]:
    """Record of a shard in the index.json of its folder, and the classes there, if any.

    Raises ValueError where the sizes differ.
    """
    index = source.parent / INDEX_NAME
    if not index.exists():
        return None, ()
    status, size = index.stat(), source.stat().st_size
    records, classes = _records(source.parent, file_state(status))
    record = records.get(source.name)
    if record is not None and size != record.size:
        raise ValueError(
            f"shard {source} has {size} bytes, {INDEX_NAME} beside it says {record.size}: it was cut or changed; make "
            "it again"
        )
    return record, classes if record is not None else ()


def _agree(found: Members, listed: Members) -> bool:
    """True where a shard holds the listed samples. Old folders say no starts and ends."""
    if not listed.starts:
        found = replace(found, starts=[], ends=[])
    return found == listed


def _is_older(source: Path) -> bool:
    """True where a shard is as it was when the index.json beside it was written.

    The inode's time of change tells it: no program sets it, other than the time of the content.
    """
    return source.stat().st_ctime_ns < (source.parent / INDEX_NAME).stat().st_ctime_ns


@lru_cache(maxsize=8)  # read once for all shards of a folder
def _records(folder: Path, state: FileState) -> tuple[dict[str, ShardRecord], tuple[str, ...]]:
    """Records by file, and classes, of the index.json of a folder."""
    index = read_index(folder)
    return ({record.file: record for record in index.shards}, tuple(index.classes)) if index else ({}, ())
