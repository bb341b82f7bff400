"""Shards of a data path: braces, globs, URLs, and lists of them."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

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

    A path is one of: a file; braces (``dir/train-{00000..00009}.tar``, in the order written); a glob (sorted); a URL,
    with braces. Several are joined with ``::``, as in webdataset.

    Raises:
        ValueError: a shard is missing or named twice, or nothing matches.
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
    if len(set(shards)) < len(shards):
        raise ValueError(f"{flag} {shown_path(data_path)} names a shard more than once")
    return shards


def _expand_files(path: str, flag: str) -> list[Path]:
    path = os.path.expanduser(path)
    is_glob = glob.has_magic(path) and not os.path.exists(path)
    found = sorted(map(Path, glob.glob(path))) if is_glob else [Path(path)]
    if not found:
        raise ValueError(f"{flag} {path!r} matches no file")
    for shard in found:
        if shard.is_dir():
            raise ValueError(f"{flag}: {shard} is a folder; name its shards, {shard}/train-*.tar")
        if not shard.is_file():
            raise ValueError(f"{flag}: {shard} does not exist, or is no file")
    return found
