"""Shards of a data path: braces, globs, folders, URLs, and lists of them."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

SHARD_ENDINGS = (".tar", ".tar.gz", ".tgz")
PIPE = "pipe:"
"""Begins a command whose output is a shard. Only a command line may give one."""
Address = Path | str
"""A shard: a file, or the text of a URL."""


def is_url(text: str) -> bool:
    """Returns True for what is fetched, False for a path."""
    return text.startswith(PIPE) or re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def shown(url: str) -> str:
    """A URL for messages, without passwords and keys."""
    if url.startswith(PIPE):
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=parts.query and "..."))


def shown_path(data_path: str) -> str:
    """A data path for messages, without passwords and keys."""
    return "::".join(shown(part) if is_url(part) else part for part in data_path.split("::"))


def expand_shards(data_path: str, flag: str = "--data-path") -> list[Address]:
    """Shards of a data path, in the order that ``--no-shuffle`` reads them.

    A path is one of: a file; braces (``dir/train-{00000..00009}.tar``, in the order written); a glob (sorted); a folder
    (its shards sorted by name); a URL, with braces. Several are joined with ``::``, as in webdataset.

    Raises:
        ValueError: a shard is missing, unreadable or named twice, nothing matches, or the folder mixes splits.
    """
    from webdataset.shardlists import expand_urls  # imports torch

    try:
        parts = expand_urls(data_path)
    except ValueError as error:
        raise ValueError(f"{flag} {data_path!r} has unbalanced braces: {error}") from error
    shards: list[Address] = []
    for part in parts:
        part = part.removeprefix("file://").removeprefix("file:")
        shards += [part] if is_url(part) else _expand_files(part, flag)
    if twice := [shown(str(shard)) for shard, count in Counter(shards).items() if count > 1]:
        raise ValueError(f"{flag} names shards more than once: {', '.join(twice[:5])}")
    return shards


def _expand_files(path: str, flag: str) -> list[Path]:
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        found = _shards_in(Path(path), flag)
    elif os.path.exists(path) or not glob.has_magic(path):
        found = [Path(path)]
    else:
        found = sorted(map(Path, glob.glob(path)))
        if not found:
            raise ValueError(f"{flag} {path!r} matches no file")
    for shard in found:
        if not shard.name.endswith(SHARD_ENDINGS):
            raise ValueError(f"{flag}: {shard} is not a shard; endings read are {', '.join(SHARD_ENDINGS)}")
        if not shard.is_file() or not os.access(shard, os.R_OK):
            raise ValueError(f"{flag}: {shard} does not exist, or is not a readable file")
    return found


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
