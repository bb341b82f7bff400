"""Data sets as folders: one folder of files for each class, perhaps below one for each split; and lists of files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from megasnn.files.sample_size import SAMPLE_BYTES, read_file
from megasnn.preprocess.items import Item, as_key, as_text

_CLASS_DIGITS = 6  # every class up to the largest has a name in the index


def require_folder(path: Path, what: str) -> Path:
    """Raises ValueError unless `path` is a folder that can be read; `what` says what should be in it."""
    if not path.is_dir():
        raise ValueError(f"--input {path} is no folder; {what} is expected there")
    return path


def read_lines(path: Path) -> list[str]:
    """The lines of a text file. Raises ValueError for one that cannot be read; names it."""
    try:
        return read_file(path, SAMPLE_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from None


def file_inside(folder: Path, name: str, listed_in: object) -> Path:
    """A file that a list names. Raises ValueError for a name that leads out of the folder."""
    if os.path.isabs(name) or ".." in Path(name).parts or "\0" in name:
        raise ValueError(f"{listed_in}: {name!r} leads out of the folder {folder}, in which all should lie")
    return folder / name


def class_names(folder: Path, class_list: Path | None) -> list[str]:
    """The classes by number: the lines of a file, otherwise the names of the folders in `folder`, sorted.

    Names that are all numbers are sorted as such. Raises ValueError for a list that is missing, empty or names a class
    twice, and where there are no folders.
    """
    if class_list is None:
        names = [entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
        if not names:
            raise ValueError(f"--input {folder} has no folders; one for each class is expected there")
        return sorted(names, key=numeric)
    if not class_list.is_file():
        raise ValueError(f"--class-list {class_list} does not exist")
    names = [line.strip() for line in read_lines(class_list) if line.strip()]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"--class-list {class_list} must name each class once, one on a line; it has {len(names)} lines"
        )
    return names


def files_of_classes(folder: Path, classes: Sequence[str], suffixes: Sequence[str]) -> list[list[Path]]:
    """The files of each class in numeric order of their names.

    Raises:
        ValueError: the folder of a class is missing, or has no file with one of the suffixes.
    """
    found = []
    for name in classes:
        if not file_inside(folder, name, "the class list").is_dir():
            raise ValueError(f"the folder {folder / name} of class {name!r} does not exist")
        files = [path for path in (folder / name).iterdir() if path.suffix.lower() in suffixes]
        if not files:
            raise ValueError(f"class {name!r} is empty: {folder / name} has no files of type {', '.join(suffixes)}")
        found.append(sorted(files, key=lambda path: numeric(path.stem)))
    return found


def splits_of_classes(
    folders: Mapping[str, Path], class_list: Path | None, suffixes: Sequence[str]
) -> tuple[dict[str, list[Item]], list[str]]:
    """Items of splits that are folders of classes, and the classes: those of the first split, which all must have.

    Raises:
        ValueError: a folder is missing or empty, or (without a list) one split has classes that the first one lacks.
    """
    first = next(iter(folders.values()))
    classes = class_names(first, class_list)
    splits = {}
    for split, folder in folders.items():
        more = sorted(set(class_names(folder, None)) - set(classes))
        if more and class_list is None:
            raise ValueError(f"{folder} has folders that {first} does not have: {', '.join(more[:5])}")
        splits[split] = items_of_classes(files_of_classes(folder, classes, suffixes))
    return splits, [as_text(name) for name in classes]


def items_of_classes(files: Sequence[Sequence[Path]]) -> list[Item]:
    """Items from the files of each class, named after class folder and file."""
    return [Item(key_of(path), label, path) for label, paths in enumerate(files) for path in paths]


def key_of(path: Path) -> str:
    """The file's name, with the class in front of it where it does not begin with that (1/10.jpg is not class 10's)."""
    name, folder = as_key(path.stem), as_key(path.parent.name)
    return name if name.startswith(f"{folder}_") else f"{folder}_{name}"


def items_of_list(list_file: Path, folder: Path, suffixes: Sequence[str]) -> list[Item]:
    """Items from a text file with a line "name class" for each; lines that begin with # are left out.

    A name may lack its ending: then the file in `folder` with that name and one of `suffixes` is meant.

    Raises:
        ValueError: the list is missing, or a line or a file that it names cannot be used; names it.
    """
    if not list_file.is_file():
        raise ValueError(f"the list {list_file} does not exist, or is no regular file")
    items = []
    for number, line in enumerate(read_lines(list_file), 1):
        fields = line.replace(",", " ").split()
        if not fields or line.startswith("#"):
            continue
        if len(fields) != 2 or not fields[1].isdecimal():
            raise ValueError(f"{list_file}, line {number}: {line!r} is not a name and a class number")
        if len(fields[1]) > _CLASS_DIGITS:
            raise ValueError(f"{list_file}, line {number}: class {fields[1]:.40} has more than {_CLASS_DIGITS} digits")
        file_inside(folder, fields[0], list_file)
        candidates = [folder / fields[0], *(folder / f"{fields[0]}{suffix}" for suffix in suffixes)]
        path = next((path for path in candidates if path.is_file()), None)
        if path is None:
            raise ValueError(f"{list_file}, line {number}: there is no file {fields[0]} (.bin, ...) in {folder}")
        items.append(Item(as_key(path.stem), int(fields[1]), path))
    return items


def numeric(name: str) -> list[tuple[int, int, str]]:
    """A sorting key by which cat_2 comes before cat_10."""
    parts = re.split(r"(\d+)", name)
    return [(1, 0, part) if not part.isdigit() else (0, int(part), "") for part in parts if part]
