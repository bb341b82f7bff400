"""index.json: contents of a folder of shards, written last. A folder without it is not finished."""

from __future__ import annotations

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
    """A shard: file name, split, size in bytes, samples, and the sources left out."""

    file: Annotated[str, Field(pattern="^[^/]+$")]
    split: str
    size: Count
    broken: list[str]
    members: Members


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
