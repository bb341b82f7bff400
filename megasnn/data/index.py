"""index.json: contents of a folder of shards, written last. A folder without it is not finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, with_config

from megasnn.files import STRICT, Count, described

INDEX_NAME = "index.json"
VERSION: Literal[1] = 1
_ADVICE = "make the shards again, or remove it"


@with_config(STRICT)
@dataclass(frozen=True)
class Members:
    """Samples of a shard in file order: keys and classes, and offsets and sizes of their data in the tar, in bytes.

    Attributes:
        suffixes: endings of the samples' data that occur.
        starts, ends: of all files of each sample, where these lie side by side; otherwise, and in old folders, empty.
    """

    keys: list[str]
    labels: list[int]
    offsets: list[Count]
    sizes: list[Count]
    suffixes: list[str]
    starts: list[Count] = field(default_factory=list)
    ends: list[Count] = field(default_factory=list)


@with_config(STRICT)
@dataclass(frozen=True)
class ShardRecord:
    """A shard: file name, split, size in bytes, samples, and the sources left out."""

    file: Annotated[str, Field(pattern="^[^/]+$")]
    split: str
    size: Count
    broken: list[str]
    members: Members


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
    return described(Index, path.read_bytes(), path, advice=_ADVICE) if path.exists() else None
