"""Which shards a data path means: braces, globs, folders, URLs, and lists of them."""

from __future__ import annotations

import glob
import os
from collections import Counter
from pathlib import Path

from megasnn.data.fetch import is_url, shown

SHARD_ENDINGS = (".tar", ".tar.gz", ".tgz")
Address = Path | str
"""Of a shard: a file, or the text of a URL."""


def expand_shards(data_path: str, flag: str = "--data-path") -> list[Address]:
    """The shards of a data path, in the order that ``--no-shuffle`` reads them.

    A path is one of: a file; braces (``dir/train-{00000..00009}.tar``, in the order written); a glob (sorted); a folder
    (its shards sorted by name); a URL, with braces. Several are joined with ``::``, as in webdataset.

    Raises:
        ValueError: a shard is missing, unreadable or named twice, nothing matches, the folder mixes splits, or a name
            is not UTF-8.
    """
    from webdataset.shardlists import expand_urls  # imports torch

    try:
        data_path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{flag} {os.fsencode(data_path)!r} is not UTF-8: rename the file or its folder") from None
    try:
        parts = expand_urls(data_path)
    except ValueError as error:
        raise ValueError(f"{flag} {data_path!r} has unbalanced braces: {error}") from error
    shards: list[Address] = []
    for part in parts:
        part = part.removeprefix("file://").removeprefix("file:")
        shards += [part] if is_url(part) else _expand_one(part, flag)
    _check([each for each in shards if isinstance(each, Path)], flag)
    twice = [shown(str(shard)) for shard, count in Counter(shards).items() if count > 1]
    if twice:
        raise ValueError(f"{flag} names shards more than once: {', '.join(twice[:5])}")
    return shards


def shown_path(data_path: str) -> str:
    """A data path as messages name it, without the passwords and keys of its URLs."""
    return "::".join(shown(part) if is_url(part) else part for part in data_path.split("::"))


def _expand_one(path: str, flag: str) -> list[Path]:
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        return _shards_in(Path(path), flag)
    if not os.path.exists(path) and glob.has_magic(path):
        found = sorted(Path(name) for name in glob.glob(path))
        if not found:
            raise ValueError(f"{flag} {path!r} matches no file")
        return found
    return [Path(path)]


def _shards_in(folder: Path, flag: str) -> list[Path]:
    found = sorted(entry for entry in folder.iterdir() if entry.name.endswith(SHARD_ENDINGS))
    if not found:
        raise ValueError(f"{flag} {folder} holds no shard ({', '.join(SHARD_ENDINGS)})")
    splits = {split for split in ("train", "val", "test") for shard in found if split in shard.name.lower()}
    if len(splits) > 1:
        raise ValueError(
            f"{flag} {folder} mixes shards of several splits ({', '.join(sorted(splits))}); "
            f"name one, for instance '{folder}/*train*.tar*'"
        )
    return found


def _check(shards: list[Path], flag: str) -> None:
    missing = [str(shard) for shard in shards if not shard.exists()]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(shards)} shards of {flag} do not exist: {', '.join(missing[:5])}"
            + (", ..." if len(missing) > 5 else "")
        )
    for shard in shards:
        if not str(shard).isprintable():
            raise ValueError(f"{flag}: {os.fsencode(shard)!r} is not UTF-8, or cannot be printed: rename it")
        if not shard.name.endswith(SHARD_ENDINGS):
            raise ValueError(f"{flag}: {shard} is not a shard; endings read are {', '.join(SHARD_ENDINGS)}")
        if not shard.is_file() or not os.access(shard, os.R_OK):
            raise ValueError(f"{flag}: {shard} is not a readable file")
