"""Samples of a data set before any is read: folders of classes, and the names that samples get in shards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megasnn.files import SAMPLE_BYTES, read_file
from megasnn.random import keyed_seed


@dataclass(frozen=True)
class Item:
    """A sample that is to be written.

    Attributes:
        key: its name in the shard, unique in its split, without dots (a webdataset key ends at the first one).
        label: class number.
        source: its file.
        part: for files of several samples: the row, or first and last time in microseconds.
    """

    key: str
    label: int
    source: Path
    part: tuple[int, ...] = ()


@dataclass(frozen=True)
class Listing:
    """Items of each split, and the names of the classes by number. Raises ValueError for keys that occur twice."""

    splits: dict[str, list[Item]]
    classes: list[str]

    def __post_init__(self) -> None:
        for split, items in self.splits.items():
            if not items:
                raise ValueError(f"there are no samples for the split {split!r}")
            seen: dict[str, Item] = {}
            for item in items:
                if (other := seen.setdefault(item.key, item)) is not item:
                    raise ValueError(
                        f"two samples of the split {split!r} would be called {item.key!r}: {other.source} and "
                        f"{item.source}; rename one"
                    )


def shuffled(items: list[Item], split: str) -> list[Item]:
    """Items in an order that depends on nothing else; those of one source stay together, so that it is read once."""
    groups: dict[Path, list[Item]] = {}
    for item in items:
        groups.setdefault(item.source, []).append(item)
    words = np.random.Philox(key=keyed_seed("shards", split)).random_raw(len(groups))
    members = list(groups.values())
    return [item for place in np.argsort(words, kind="stable").tolist() for item in members[place]]


def read_lines(path: Path) -> list[str]:
    """Lines of a text file, without empty ones. Raises ValueError, naming a file that cannot be read."""
    try:
        lines = read_file(path, SAMPLE_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from None
    return [line.strip() for line in lines if line.strip()]


def inside(folder: Path, name: str) -> Path:
    """A file that a list names. Raises ValueError for a name that leads out of the folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name!r} leads out of the folder {folder}, in which all should lie")
    return folder / name


def split_folders(folder: Path) -> dict[str, Path]:
    """Folders train, val and test as far as they exist, by name; Train and Test are taken too."""
    found = {entry.name.lower(): entry for entry in _visible(folder) if entry.is_dir()}
    return {split: found[split] for split in ("train", "val", "test") if split in found}


def class_names(folder: Path) -> list[str]:
    """Classes by number: names of the folders, sorted, numbers as such. Raises ValueError where there are none."""
    names = [entry.name for entry in _visible(folder) if entry.is_dir()]
    if not names:
        raise ValueError(f"{folder} has no folders; one for each class is expected there")
    return sorted(names, key=_numeric)


def items_of_classes(folder: Path, classes: Sequence[str], suffixes: Sequence[str]) -> list[list[Item]]:
    """Items of each class, in numeric order of the names of the files in its folder."""
    return [
        [Item(key_of(path, name), label, path) for path in files_of(folder / name, suffixes)]
        for label, name in enumerate(classes)
    ]


def files_of(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Files of a folder in numeric order of their names; hidden ones (.DS_Store, ._x.jpg) are left out.

    Raises:
        ValueError: it is missing, or has no file with one of the suffixes.
    """
    if not folder.is_dir():
        raise ValueError(f"the folder {folder} does not exist")
    files = [path for path in _visible(folder) if path.suffix.lower() in suffixes]
    if not files:
        raise ValueError(f"{folder} has no files of type {', '.join(suffixes)}")
    return sorted(files, key=lambda path: _numeric(path.stem))


def list_classes(folders: Mapping[str, Path], suffixes: Sequence[str]) -> Listing:
    """Listing of splits that are folders of classes; the classes are those of the first split, which all must have.

    Raises:
        ValueError: a folder is missing or empty, or a split has classes that the first one lacks.
    """
    first = next(iter(folders.values()))
    classes = class_names(first)
    splits = {}
    for split, folder in folders.items():
        if more := sorted(set(class_names(folder)) - set(classes)):
            raise ValueError(f"{folder} has folders that {first} does not have: {', '.join(more[:5])}")
        splits[split] = [item for items in items_of_classes(folder, classes, suffixes) for item in items]
    return Listing(splits, classes)


def key_of(path: Path, class_name: str) -> str:
    """Key of a file: its name, with the class in front where it does not begin with that.

    Raises:
        ValueError: bytes that are no UTF-8, or control characters.
    """
    if not (class_name + path.stem).isprintable():
        raise ValueError(f"the name of {str(path)!r} is not UTF-8, or has control characters; rename it")
    name, class_name = path.stem.replace(".", "_"), class_name.replace(".", "_")
    return name if name.startswith(f"{class_name}_") else f"{class_name}_{name}"


def _visible(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if not entry.name.startswith(".")]


def _numeric(name: str) -> list[tuple[int, int, str]]:
    """Sorting key by which cat_2 comes before cat_10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]
