"""Folders of a data set: those of its splits and classes, and the files in them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Split of a folder's name; Train and Test are taken, too."""


def split_folders(folder: Path) -> dict[str, Path]:
    """Folders of the splits train, val and test that exist, in this order. Raises ValueError for two of one split."""
    found: dict[str, Path] = {}
    for entry in visible(folder):
        split = _SPLITS.get(entry.name.lower()) if entry.is_dir() else None
        if split is not None and found.setdefault(split, entry) != entry:
            raise ValueError(f"{found[split]} and {entry} are both of the split {split!r}; put their files together")
    return {split: found[split] for split in dict.fromkeys(_SPLITS.values()) if split in found}


def class_names(folder: Path) -> list[str]:
    """Classes by number: names of the folders, sorted, numbers as such. Raises ValueError where there are none."""
    names = [entry.name for entry in visible(folder) if entry.is_dir()]
    if not names:
        raise ValueError(f"{folder} has no folders; one for each class is expected there")
    return sorted(names, key=_numeric)


def files_of(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Files of these types at any depth of a folder, in numeric order of their names. Raises ValueError without any."""
    files = [path for path in walk(folder) if path.suffix.lower() in suffixes]
    if not files:
        raise ValueError(f"{folder} has no files of type {', '.join(suffixes)}")
    return sorted(files, key=lambda path: (_numeric_path(path.relative_to(folder)), path.name))


def walk(folder: Path) -> Iterator[Path]:
    """Files at any depth of a folder; hidden ones (.DS_Store, ._x.jpg) are left out.

    Links are followed, into each folder once: they may lead in a circle. Raises OSError for a folder that cannot be
    read, and ValueError for one that does not exist.
    """
    visible(folder)
    seen: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _refuse(error: OSError) -> None:
    raise error


def describe_left_out(folder: Path, used: Collection[Path]) -> str:
    """Number, types and the first of the files in a folder that are not used; "" where there are none."""
    others = [path for path in walk(folder) if path not in used]
    if not others:
        return ""
    types: dict[str, int] = {}
    for path in others:
        types[path.suffix.lower()] = types.get(path.suffix.lower(), 0) + 1
    counts = ", ".join(f"{count} {suffix or 'without an ending'}" for suffix, count in sorted(types.items()))
    return f"{len(others)} files of {folder} are no samples and were left out ({counts}): {others[0]}"


def visible(folder: Path) -> list[Path]:
    """Entries of a folder without hidden names, sorted. Raises ValueError where it does not exist."""
    if not folder.is_dir():
        raise ValueError(f"the folder {folder} does not exist")
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _numeric_path(path: Path) -> list[list[tuple[int, int, str]]]:
    return [_numeric(part) for part in path.with_suffix("").parts]


def _numeric(name: str) -> list[tuple[int, int, str]]:
    """Sorting key by which cat_2 comes before cat_10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]
