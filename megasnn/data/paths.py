"""Which shards a data path means: braces, globs, folders, URLs, and lists of them."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from pathlib import Path
from urllib.request import url2pathname

from braceexpand import braceexpand

from megasnn.data.remote.address import is_command, is_http, is_url, require_address, shown
from megasnn.data.remote.tools import require_opener

SHARD_ENDINGS = (".tar", ".tar.gz", ".tgz")
_FILE = "file:"
# Between brackets it belongs to an address, as in http://[::1]/.
_JOINT = re.compile(r"::(?![^\[\]]*\])")
Address = Path | str
"""Of a shard: a file, or the text of a URL."""


def expand_shards(data_path: str, flag: str = "--data-path") -> list[Address]:
    """The shards of a data path, in the order that ``--no-shuffle`` reads them.

    A path is one of: a file; braces (``dir/train-{00000..00009}.tar``, in the order written); a glob
    (sorted); a folder (its shards sorted by name); a URL that webdataset opens, with braces (``file:`` is a path).
    Several are joined with ``::``, as in webdataset. What is a URL is so before its braces are expanded, and what
    follows ``file:`` never is one.

    Raises:
        ValueError: a shard is missing, unreadable or named twice, nothing matches, the folder mixes splits,
            nothing opens such URLs, a URL names no place, or the ending of a path is not .tar, .tar.gz or .tgz.
    """
    shards: list[Address] = []
    for part in _JOINT.split(data_path):
        fetched = is_url(part) and not part.startswith(_FILE)
        if part.startswith(_FILE):
            part = url2pathname(part.removeprefix(_FILE).removeprefix("//"))
        if fetched:
            require_address(part)
            if not is_http(part) and not is_command(part):
                require_opener(part)
        try:
            expanded = list(braceexpand(part))
        except ValueError as error:
            raise ValueError(f"{flag} {part!r} has unbalanced braces: {error}") from error
        for path in expanded:
            shards += [path] if fetched else _expand_one(path, flag)
    _check([each for each in shards if isinstance(each, Path)], flag)
    repeated = [shard for shard, count in Counter(shards).items() if count > 1]
    twice = [str(shard) if isinstance(shard, Path) else shown(shard) for shard in repeated]
    if twice:
        raise ValueError(f"{flag} names shards more than once: {', '.join(twice[:5])}")
    return shards


def shown_path(data_path: str) -> str:
    """A data path as messages name it, without the passwords and keys of its URLs."""
    return "::".join(shown(part) if is_url(part) else part for part in _JOINT.split(data_path))


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
