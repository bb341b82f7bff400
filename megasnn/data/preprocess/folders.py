"""A data set's folders: splits, classes, and their files."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from megasnn.common.files import quantity

_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Split by lower-case folder name."""


def split_folders(folder: Path) -> dict[str, Path]:
    """Existing folders for train, val and test. Raises ValueError for two folders of one split."""
    found: dict[str, Path] = {}
    for entry in visible(folder):
        split = _SPLITS.get(entry.name.lower())
        if split is None or not entry.is_dir():
            continue
        if found.setdefault(split, entry) != entry:
            raise ValueError(f"{found[split]} and {entry} are both the split {split!r}; move their files into one")
    return {split: found[split] for split in ("train", "val", "test") if split in found}


def class_names(folder: Path) -> list[str]:
    """Class names by number: the folders' names in numeric order. Raises ValueError for none."""
    names = [entry.name for entry in visible(folder) if entry.is_dir()]
    if not names:
        raise ValueError(f"{folder} has no folders; it needs one for each class")
    return sorted(names, key=_numeric)


def files_of(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Files with these endings at any depth, in numeric order. Raises ValueError for none."""
    files = [path for path in walk(folder) if path.suffix.lower() in suffixes]
    if not files:
        raise ValueError(f"{folder} has no files of type {', '.join(suffixes)}")
    return sorted(files, key=lambda path: (_numeric_path(path.relative_to(folder)), path.name))


def walk(folder: Path) -> Iterator[Path]:
    """Yields files at any depth, without hidden ones (.DS_Store, ._x.jpg). Raises OSError and ValueError."""
    visible(folder)
    seen: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        status = os.stat(parent)
        identity = (status.st_dev, status.st_ino)
        if identity in seen:
            # Links may lead in a circle.
            folders.clear()
            continue
        seen.add(identity)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _refuse(error: OSError) -> None:
    raise error


def describe_left_out(folder: Path, used: Collection[Path]) -> str:
    """Sentence about unused files in a folder; "" for none."""
    others = [path for path in walk(folder) if path not in used]
    if not others:
        return ""
    types = Counter(path.suffix.lower() for path in others)
    counts = ", ".join(f"{count} {suffix or 'without an ending'}" for suffix, count in sorted(types.items()))
    return f"left out of {folder}: {quantity(len(others), 'file')} that are no samples ({counts}), such as {others[0]}"


def visible(folder: Path) -> list[Path]:
    """Sorted entries without hidden ones. Raises ValueError if `folder` is none."""
    if not folder.exists():
        raise ValueError(f"the folder {folder} does not exist")
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _numeric_path(path: Path) -> list[list[tuple[int, int, str]]]:
    return [_numeric(part) for part in path.with_suffix("").parts]


def _numeric(name: str) -> list[tuple[int, int, str]]:
    """Sorting key: cat_2 comes before cat_10."""
    # The first entry keeps numbers and text apart, which cannot be compared.
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
