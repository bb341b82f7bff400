"""index.json: contents of a folder of shards, written last. A folder without it is not finished."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

INDEX_NAME = "index.json"
VERSION: Literal[1] = 1
_STRICT = with_config(ConfigDict(strict=True, extra="forbid"))
T = TypeVar("T")
Count = Annotated[int, Field(ge=0, le=1 << 62)]


@_STRICT
@dataclass(frozen=True)
class Members:
    """Samples of a shard in file order: keys and classes, and offsets and sizes of their data in the tar, in bytes.

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


@_STRICT
@dataclass(frozen=True)
class ShardRecord:
    """A shard: file name, split, number of samples, size in bytes, sha256 of the file, and the sources left out.

    Attributes:
        members: None where the tar has to be scanned.
    """

    file: Annotated[str, Field(pattern="^[^/]+$")]
    split: str
    samples: Count
    size: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    broken: list[str]
    members: Members | None = None


@_STRICT
@dataclass(frozen=True)
class Index:
    """A folder of shards: options they were made with, class names by number, shards, version."""

    options: dict[str, Any]
    classes: list[str]
    shards: list[ShardRecord]
    version: Literal[1] = VERSION

    def of_split(self, split: str) -> list[ShardRecord]:
        return [shard for shard in self.shards if shard.split == split]


def read_index(folder: Path) -> Index | None:
    """Index of a folder of shards; None where there is none. Raises ValueError as `parse_json`."""
    path = folder / INDEX_NAME
    return parse_json(Index, path.read_bytes(), path) if path.exists() else None


def parse_json(kind: type[T], content: bytes, source: object) -> T:
    """Value of JSON. Raises ValueError, naming `source` and the first wrong field."""
    try:
        return TypeAdapter(kind).validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{source}: {field}: {first['msg']}; make the shards again, or remove it") from None


def verify(folder: Path) -> list[str]:
    """Reads all shards that the index of `folder` lists; returns a line for each damaged one.

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
        elif (found := sha256_of(path)) != record.sha256:
            wrong.append(f"{path} has changed: its sha256 is {found}, its index says {record.sha256}")
    return wrong


def sha256_of(path: Path) -> str:
    """Checksum of a file, as hexadecimal text."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
