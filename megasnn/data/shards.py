"""Shards: webdataset tars whose samples are read by one seek, and their index.json.

Files with one name up to the first dot are a sample: an image (``<key>.jpg``) or events (``<key>.frames.npz``,
``<key>.events.npz``) with a class (``<key>.cls``, an integer as text), or arrays (``<key>.npy``, ``<key>.seg.png``).
Offsets come from the index.json beside a shard, otherwise from its headers, once.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

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
"""Version of index.json. A folder without one is unfinished, or another program's."""
LABEL = "cls"
SAMPLE_SUFFIXES = (*IMAGE_SUFFIXES, FRAMES, EVENTS)
"""Endings of a sample's image or events."""
FileState = tuple[int, int, int]
"""Size in bytes, time of change in ns, and inode."""
_INDEX_VERSION = "8"  # of the index in the cache; raise it when `scan` changes
_LABEL_BYTES = 32
_INDEX_ADVICE = "make the shards again, or remove it"
_COPY_ADVICE = "copy or download it again"


@with_config(STRICT)
@dataclass(frozen=True)
class Members:
    """A shard's samples in file order: keys, classes, and their data's offsets and sizes in bytes.

    Attributes:
        starts, ends: around each sample's files; empty if these are not adjacent, and in old indexes.
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
        if self.starts or self.ends:
            lengths |= {len(self.starts), len(self.ends)}
        if len(lengths) > 1:
            raise ValueError(f"lists of one shard have different lengths, {sorted(lengths)}")


@with_config(STRICT)
@dataclass(frozen=True)
class ShardRecord:
    """A shard in index.json: file name, split, size in bytes, broken sources, samples."""

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
    """An index.json: class names by number, shards, version."""

    classes: list[str]
    shards: list[ShardRecord]
    version: Literal[1] = VERSION

    def of_split(self, split: str) -> list[ShardRecord]:
        return [shard for shard in self.shards if shard.split == split]


def read_index(folder: Path) -> Index | None:
    """A folder's index, or None. Raises ValueError naming the first wrong field."""
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    return described(Index, read_regular(path), path, advice=_INDEX_ADVICE)


@dataclass(frozen=True)
class TarFile:
    """A shard ready to be read.

    Attributes:
        name: the user's path or URL, for messages.
        state: `file_state` when `tar` was indexed.
    """

    name: str
    tar: Path
    state: FileState
    members: Members
    classes: tuple[str, ...] = ()
    split: str = ""


def file_state(status: os.stat_result) -> FileState:
    """A file's state, which changes with its content."""
    return status.st_size, status.st_mtime_ns, status.st_ino


def read_part(file: Path, state: FileState, size: int, offset: int) -> bytes:
    """Reads bytes of a file that had `state` before. Raises OSError if it has changed."""
    handle = opened_file(file, state).fileno()
    # A replaced file stays open under its old inode; a file changed in place has another size or time.
    if file_state(os.fstat(handle)) != state:
        raise OSError(f"{file} was changed while in use")
    content = os.pread(handle, size, offset)
    if len(content) != size:
        raise OSError(f"{file} ends before byte {offset + size:,}")
    return content


# A process keeps at most 16 files open.
@lru_cache(maxsize=16)
def opened_file(file: Path, state: FileState) -> BinaryIO:
    return open(file, "rb", buffering=0)


def open_shard(source: Path, name: str | None = None) -> TarFile:
    """Opens a tar or .tar.gz; `name` is for messages. Raises ValueError as `scan`, or if index.json differs."""
    name = name or str(source)
    tar = source
    record, classes = _record_beside(source)
    split = "" if record is None else record.split
    state = file_state(source.stat())
    with open(source, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    if is_gzip:
        # gzip has no random access.
        tar = cache_folder("unpacked") / cached_name(source, ".tar")
        build_once(tar, lambda path: _unpack(source, path, name))
        state = file_state(tar.stat())
    elif record is not None and _is_older_than_index(source):
        # Unchanged since index.json was written, so its headers need not be read.
        return TarFile(name, tar, state, record.members, classes, split)
    target = cache_folder("index") / cached_name(tar, ".json", _INDEX_VERSION)
    build_once(target, lambda path: path.write_bytes(to_json(asdict(scan(tar, name)))))
    members = described(Members, target.read_bytes(), target)
    if record is not None and tar == source and not _agree(members, record.members):
        raise ValueError(
            f"shard {name} was changed after {INDEX_NAME} beside it was written, and its samples or classes differ "
            f"from the index; make the folder again, or remove {INDEX_NAME}"
        )
    return TarFile(name, tar, state, members, classes, split)


def scan(tar: Path, name: str) -> Members:
    """Reads a tar's headers and classes. Raises ValueError for a damaged or empty tar or sample."""
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    for member, key, suffix in _members(tar, name):
        _check_member(member, key, name)
        if suffix in samples.setdefault(key, {}):
            raise ValueError(f"shard {name} holds {member.name!r} twice; keys must be unique in a shard")
        samples[key][suffix] = member
    if not samples:
        raise ValueError(f"shard {name} holds no samples; leave it out or write it again")
    suffixes = set()
    labels = []
    offsets = []
    sizes = []
    starts = []
    ends = []
    with open(tar, "rb") as file:
        for key, files in samples.items():
            suffix = _data_suffix(key, files, name)
            suffixes.add(suffix)
            # Arrays need no class: a model may have another target.
            labels.append(_label(file.fileno(), files[LABEL], name) if LABEL in files else -1)
            offsets.append(files[suffix].offset_data)
            sizes.append(files[suffix].size)
            starts.append(min(each.offset for each in files.values()))
            ends.append(max(each.offset_data + each.size for each in files.values()))
    # Files of one sample may lie between another's: then no single read has a whole sample.
    overlap = any(start < end for start, end in zip(starts[1:], ends, strict=False))
    if overlap:
        starts = []
        ends = []
    return Members(list(samples), labels, offsets, sizes, sorted(suffixes), starts, ends)


def _data_suffix(key: str, files: Mapping[str, tarfile.TarInfo], name: str) -> str:
    """Ending for a sample's image, events or first array. Raises ValueError for an incomplete sample."""
    found = [suffix for suffix in SAMPLE_SUFFIXES if suffix in files]
    arrays = [suffix for suffix in files if _is_array(suffix)]
    if (len(found) != 1 or LABEL not in files) and not arrays:
        raise ValueError(
            f"sample {key!r} of shard {name} has the files {', '.join(sorted(files))}; it needs a label "
            f"({key}.{LABEL}) and exactly one of {', '.join(SAMPLE_SUFFIXES)}"
        )
    return (found or arrays)[0]


def _is_array(suffix: str) -> bool:
    return suffix == "npy" or suffix.endswith((".npy", ".png"))


def split_name(name: str) -> tuple[str, str]:
    """Key and ending in a file name, by webdataset's rule; both empty for other files."""
    from webdataset.tariterators import base_plus_ext  # imports torch

    key, suffix = base_plus_ext(name)
    return key or "", (suffix or "").lower()


def _members(tar: Path, name: str) -> Iterator[tuple[tarfile.TarInfo, str, str]]:
    """Yields samples' files with key and ending."""
    length = tar.stat().st_size
    try:
        with tarfile.open(tar, mode="r:") as archive:
            for member in archive:
                # The size of a sparse file counts its holes. `_check_member` refuses it by name.
                if not member.issparse() and member.offset_data + member.size > length:
                    raise tarfile.ReadError(f"member {member.name!r} extends past byte {length}")
                key, suffix = split_name(member.name)
                if not member.isreg() or not (suffix in (*SAMPLE_SUFFIXES, LABEL) or _is_array(suffix)):
                    continue
                yield member, key, suffix
            end = archive.offset
    except (tarfile.TarError, OverflowError, ValueError) as error:
        problem = f"shard {name} is cut, compressed, or no tar file ({error})"
        raise ValueError(f"{problem}; {_COPY_ADVICE}, or decompress it") from error
    # tarfile accepts a tar that was cut between two members, and the first of two joined tars.
    with open(tar, "rb") as file:
        file.seek(end)
        rest = file.read(1 << 20)
    if len(rest) < tarfile.BLOCKSIZE or any(rest):
        raise ValueError(
            f"shard {name} has no end mark at byte {end}: it was cut, or joined to another; {_COPY_ADVICE}"
        )


def _check_member(member: tarfile.TarInfo, key: str, name: str) -> None:
    if not member.name.isprintable():
        raise ValueError(f"shard {name}: the name {member.name[:NAME_BYTES]!r} is not UTF-8; rename it")
    if len(os.fsencode(key)) > NAME_BYTES:
        raise ValueError(f"shard {name}: the name {key[:40]!r}... has more than {NAME_BYTES} bytes; shorten it")
    # Its bytes in the tar lack the holes.
    if member.issparse():
        raise ValueError(f"shard {name}: {member.name!r} is stored as a sparse file; pack it without tar's --sparse")


def _label(file: int, member: tarfile.TarInfo, name: str) -> int:
    # One byte more than allowed shows that a file is too long, whatever its size.
    text = os.pread(file, min(member.size, _LABEL_BYTES + 1), member.offset_data)
    if len(text) <= _LABEL_BYTES and re.fullmatch(rb"\s*[+-]?[0-9]+\s*", text):
        number = int(text)
        if -(1 << 31) <= number < 1 << 31:
            return number
    raise ValueError(f"{member.name} in shard {name} holds {text!r}; it must hold a class number alone")


def _unpack(packed: Path, target: Path, name: str) -> None:
    try:
        with gzip.open(packed) as content, open(target, "wb") as plain:
            shutil.copyfileobj(content, plain, 1 << 20)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"shard {name} is cut or damaged ({error}); {_COPY_ADVICE}") from error


def _record_beside(source: Path) -> tuple[ShardRecord | None, tuple[str, ...]]:
    """A shard's record and classes in the index.json beside it. Raises ValueError for another size."""
    index = source.parent / INDEX_NAME
    if not index.exists():
        return None, ()
    records, classes = _records(source.parent, file_state(index.stat()))
    record = records.get(source.name)
    if record is None:
        return None, ()
    size = source.stat().st_size
    if size != record.size:
        raise ValueError(
            f"shard {source} has {size} bytes, and {INDEX_NAME} beside it says {record.size}: it was cut or changed; "
            "make it again"
        )
    return record, classes


def _agree(found: Members, listed: Members) -> bool:
    # An old index has no starts and ends.
    if not listed.starts:
        found = replace(found, starts=[], ends=[])
    return found == listed


def _is_older_than_index(source: Path) -> bool:
    # Programs can set the time of the content (mtime), but not the time of the inode's change (ctime).
    return source.stat().st_ctime_ns < (source.parent / INDEX_NAME).stat().st_ctime_ns


# Read once for all shards of a folder.
@lru_cache(maxsize=8)
def _records(folder: Path, state: FileState) -> tuple[dict[str, ShardRecord], tuple[str, ...]]:
    index = read_index(folder)
    if index is None:
        return {}, ()
    return {record.file: record for record in index.shards}, tuple(index.classes)
