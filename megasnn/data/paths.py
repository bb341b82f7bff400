"""Which shards a data path means: braces, globs, folders and lists of them, on a mounted file system."""

from __future__ import annotations

import glob
import os
from collections import Counter
from pathlib import Path

from braceexpand import braceexpand

SHARD_ENDINGS = (".tar", ".tar.gz", ".tgz")


def expand_shards(data_path: str, flag: str = "--data-path") -> list[Path]:
    """The shards of a data path, in the order that ``--no-shuffle`` reads them.

    A path is one of: a file; braces (``dir/train-{00000..00009}.tar``, in the order written); a glob
    (sorted); a folder (its shards sorted by name). Several are joined with ``::``, as in webdataset.

    Raises:
        ValueError: a shard is missing, unreadable or named twice, nothing matches, the folder mixes splits,
            the path is a URL, or the ending is not .tar, .tar.gz or .tgz.
    """
    shards: list[Path] = []
    for part in data_path.split("::"):
        if "://" in part or part.startswith("pipe:"):
            raise ValueError(f"{flag} {part!r} is a URL; shards are read from files: copy or mount them first")
        try:
            expanded = list(braceexpand(part))
        except ValueError as error:
            raise ValueError(f"{flag} {part!r} has unbalanced braces: {error}") from error
        for path in expanded:
            shards += _expand_one(path, flag)
    _check(shards, flag)
    return shards


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
    missing = [shard for shard in shards if not shard.exists()]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(shards)} shards of {flag} do not exist: "
            + ", ".join(map(str, missing[:5]))
            + (", ..." if len(missing) > 5 else "")
        )
    for shard in shards:
        if not shard.name.endswith(SHARD_ENDINGS):
            raise ValueError(f"{flag}: {shard} is not a shard; endings read are {', '.join(SHARD_ENDINGS)}")
        if not shard.is_file() or not os.access(shard, os.R_OK):
            raise ValueError(f"{flag}: {shard} is not a readable file")
    twice = [str(shard) for shard, count in Counter(shards).items() if count > 1]
    if twice:
        raise ValueError(f"{flag} names shards more than once: {', '.join(twice[:5])}")
