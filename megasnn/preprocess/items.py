"""What a data set consists of, before anything is read: its samples by split, and its classes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megasnn.random import keyed_seed


@dataclass(frozen=True)
class Item:
    """A sample that is to be written.

    Attributes:
        key: its name in the shard, unique in its split, without dots (a webdataset key ends at the first one).
        label: class number.
        source: the file that it is in.
        part: what of that file, where it holds several samples: row numbers or times.
    """

    key: str
    label: int
    source: Path
    part: tuple[int, ...] = ()


@dataclass(frozen=True)
class Listing:
    """All items of a data set: those of each split in a fixed order, and the names of the classes by number."""

    splits: dict[str, list[Item]]
    classes: list[str]

    def check(self) -> None:
        """Raises ValueError for a split without samples, and for keys that occur twice."""
        for split, items in self.splits.items():
            if not items:
                raise ValueError(f"there are no samples for the split {split!r}")
            _check_keys(split, items)

    def fingerprint(self) -> str:
        """A hash of splits, keys, labels and classes; the folder they lie in and their contents are not part of it."""
        digest = hashlib.blake2b(digest_size=16)
        for split, items in self.splits.items():
            digest.update(f"\n{split}\n".encode())
            digest.update("\n".join(f"{item.key} {item.label} {item.part}" for item in items).encode())
        digest.update("\0".join(self.classes).encode())
        return digest.hexdigest()


def as_key(text: str) -> str:
    """Text as a webdataset key: a dot would end it."""
    return as_text(text).replace(".", "_")


def as_text(name: str) -> str:
    r"""A file name, or a message with one, as text that can be stored: a byte that is no UTF-8 becomes \xff."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def shuffled(items: list[Item], seed: int, split: str) -> list[Item]:
    """The items in an order that depends on `seed` and `split` only; those of one source file stay together.

    A file is then read once or twice, however many samples it holds.
    """
    groups: dict[Path, list[Item]] = {}
    for item in items:
        groups.setdefault(item.source, []).append(item)
    words = np.random.Philox(key=keyed_seed(seed, "shards", split)).random_raw(len(groups))
    members = list(groups.values())
    return [item for place in np.argsort(words, kind="stable").tolist() for item in members[place]]


def _check_keys(split: str, items: Iterable[Item]) -> None:
    seen: dict[str, Item] = {}
    for item in items:
        other = seen.setdefault(item.key, item)
        if other is not item:
            raise ValueError(
                f"two samples of the split {split!r} would be called {item.key!r}: {other.source} and {item.source}; "
                f"rename one"
            )
