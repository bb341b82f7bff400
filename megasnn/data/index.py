"""index.json: what a folder of shards holds, written last. Without it the folder is not finished."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, with_config

from megasnn.files import STRICT, Count, FreeForm, described

INDEX_NAME = "index.json"
VERSION: Literal[1] = 1
_BLOCK = 1 << 20
_ADVICE = "make the shards again, or remove it to use them unchecked"


@with_config(STRICT)
@dataclass(frozen=True)
class Members:
    """The samples of a shard in file order: their keys and classes, and where their data lie in the tar, in bytes.

    Attributes:
        suffixes: endings of the samples' data that occur.
    """

    keys: list[str]
    labels: list[int]
    offsets: list[Count]
    sizes: list[Count]
    suffixes: list[str]

    def __post_init__(self) -> None:
        if len({len(self.keys), len(self.labels), len(self.offsets), len(self.sizes)}) > 1:
            raise ValueError("keys, labels, offsets and sizes should have one entry for each sample")


@with_config(STRICT)
@dataclass(frozen=True)
class ShardRecord:
    """A shard: file name, split, number of samples, size in bytes, sha256 of the file, and the sources left out.

    Attributes:
        members: where its samples lie; None where that has to be read from the tar.
    """

    file: Annotated[str, Field(pattern="^[^/]+$")]
    split: str
    samples: Count
    size: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    broken: list[str]
    members: Members | None = None


@with_config(STRICT)
@dataclass(frozen=True)
class Index:
    """A folder of shards: the options they were made with, the class names by number, the shards; the version."""

    options: FreeForm
    classes: list[str]
    shards: list[ShardRecord]
    version: Literal[1] = VERSION

    def of_split(self, split: str) -> list[ShardRecord]:
        return [shard for shard in self.shards if shard.split == split]


def read_index(folder: Path) -> Index | None:
    """The index of a folder of shards; None where there is none. Raises ValueError for one that makes no sense."""
    path = folder / INDEX_NAME
    return parse_index(path.read_bytes(), path) if os.path.lexists(path) else None


def parse_index(content: bytes, source: object) -> Index:
    """An index of shards from its JSON. Raises ValueError, naming `source` and the field that is wrong."""
    return described(Index, content, source, advice=_ADVICE)


def verify(folder: Path, progress: Callable[[int], object] = lambda size: None) -> list[str]:
    """Read all shards that the index of `folder` lists; returns what is wrong, a line for each shard.

    Args:
        progress: called with the number of bytes read, from time to time.
    Raises:
        ValueError: there is no index, or it cannot be read.
    """
    index = read_index(folder)
    if index is None:
        raise ValueError(f"{folder} has no {INDEX_NAME}; megasnn-preprocess-data writes one")
    wrong = []
    for record in index.shards:
        path = folder / record.file
        if not path.is_file():
            wrong.append(f"{path} is missing, or no file")
        elif (size := path.stat().st_size) != record.size:
            wrong.append(f"{path} has {size} bytes, its index says {record.size}")
        elif (found := sha256_of(path, progress)) != record.sha256:
            wrong.append(f"{path} has changed: its sha256 is {found}, its index says {record.sha256}")
    return wrong


def sha256_of(path: Path, progress: Callable[[int], object] = lambda size: None) -> str:
    """Checksum of a file, as hexadecimal text."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()
