"""Shards of a data path: folders, braces, globs, lists, and URLs, fetched into the cache once per host.

requests fetches ``http(s)``, webdataset's gopen runs commands after ``pipe:``, and fsspec fetches all other schemes.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit, urlunsplit

import fsspec
import requests
from braceexpand import braceexpand
from tqdm.contrib.concurrent import thread_map

from megasnn.common.files import MOST_SHARDS, build_once, cache_folder, name_in_cache
from megasnn.config.data import PIPE, names_command
from megasnn.data.shards import TarFile, open_shard

Address = Path | str
"""A shard: a file, or a URL."""
_HTTP = ("http://", "https://")
_AT_A_TIME = 4
_TRIES = 3
_PAUSE_SECONDS = 1.0
_SILENCE_SECONDS = 60.0  # of an http server
_FINAL = (FileNotFoundError, ImportError, ValueError)  # not tried again
_T = TypeVar("_T")


class FetchError(ValueError):
    """A URL cannot be fetched. The message names it."""


class RemoteShard(NamedTuple):
    """A shard behind a URL.

    Attributes:
        size: in bytes; None if unknown.
        version: ETag or time of change; "" if unknown.
    """

    url: str
    size: int | None
    version: str = ""

    @property
    def target(self) -> Path:
        """Path in the cache, by URL, size and version."""
        name = "pipe"
        if not self.url.startswith(PIPE):
            name = PurePosixPath(urlsplit(self.url).path).name
        return cache_folder("shards") / name_in_cache(name, ".tar", self.url, str(self.size), self.version)


def describe_remote(urls: Sequence[str]) -> list[RemoteShard]:
    """Asks for sizes and versions. Raises FetchError for a missing shard or no answer."""
    with ThreadPoolExecutor(4 * _AT_A_TIME) as pool:
        return list(pool.map(lambda url: _persist(url, partial(_describe, url)), urls))


def open_remote(shards: Sequence[RemoteShard]) -> list[TarFile]:
    """Fetches shards into the cache and opens them. Raises FetchError, CacheError, and ValueError as `open_shard`."""
    missing = [each for each in shards if not each.target.exists()]

    def fetch(remote: RemoteShard) -> None:
        build_once(remote.target, lambda path: _persist(remote.url, lambda: _download(remote, path)))

    # One progress bar for a host, not for each of its ranks.
    quiet = not missing or os.environ.get("LOCAL_RANK", "0") != "0"
    # None: show the bar on a terminal only.
    disable = True if quiet else None
    thread_map(fetch, missing, max_workers=_AT_A_TIME, desc="fetching shards", unit=" shards", disable=disable)
    opened = []
    for remote in shards:
        try:
            opened.append(open_shard(remote.target, shown_url(remote.url)))
        except ValueError:
            # A damaged shard would stay in the cache; so the next run fetches it anew.
            remote.target.unlink(missing_ok=True)
            raise
    return opened


def _persist(url: str, action: Callable[[], _T]) -> _T:
    """Tries an action on a URL three times. Raises FetchError without passwords and keys."""
    attempt = 1
    while True:
        try:
            return action()
        except Exception as error:
            # Packages behind fsspec have no common class.
            if isinstance(error, _FINAL) or attempt == _TRIES:
                shown = shown_url(url)
                # Messages of the packages contain URLs with user names, passwords and keys.
                reason = re.sub(r"//[^/@\s]*@", "//", str(error).replace(url, shown))
                reason = re.sub(r"[?][^\s)]+", "?...", reason)[:300]
                raise FetchError(f"cannot fetch {shown}: {type(error).__name__}: {reason}") from error
        time.sleep(attempt * _PAUSE_SECONDS)
        attempt += 1


def _download(remote: RemoteShard, path: Path) -> None:
    with closing(_open(remote.url)) as stream, open(path, "wb") as file:
        shutil.copyfileobj(stream, file, 1 << 20)
    received = path.stat().st_size
    if remote.size is not None and received != remote.size:
        raise OSError(f"received {received} bytes of {remote.size}: the shard was cut or changed")


def _open(url: str) -> Any:
    if url.startswith(PIPE):
        from webdataset.gopen import gopen  # imports torch

        return gopen(url, "rb")
    if url.startswith(_HTTP):
        # Raises at its end if the server announced more bytes.
        return _http(url).raw
    return fsspec.open(url, "rb").open()


def _describe(url: str) -> RemoteShard:
    if url.startswith(PIPE):
        return RemoteShard(url, None)
    if url.startswith(_HTTP):
        with closing(_http(url)) as response:
            length = response.headers.get("Content-Length")
            size = None if length is None else int(length)
            version = response.headers.get("ETag") or response.headers.get("Last-Modified", "")
            return RemoteShard(url, size, version)
    system, path = fsspec.core.url_to_fs(url)
    # First of all: a missing file or a refused login is an error here, whatever the file system answers below.
    size = system.size(path)
    version = ""
    # A file system without times of change raises one of these. Then the size alone tells a changed shard.
    with suppress(NotImplementedError, KeyError):
        version = str(system.modified(path))
    return RemoteShard(url, size, version)


def _http(url: str) -> requests.Response:
    """Response without its content. Raises FileNotFoundError if the server refuses, OSError for other errors."""
    # By GET, because signed addresses refuse HEAD. Content unpacked on the way would not have the announced length.
    response = requests.get(url, stream=True, timeout=_SILENCE_SECONDS, headers={"Accept-Encoding": "identity"})
    if 400 <= response.status_code < 500:
        response.close()
        raise FileNotFoundError(f"the server answers {response.status_code} ({response.reason})")
    response.raise_for_status()
    return response


def is_url(text: str) -> bool:
    """True for an address to fetch."""
    return text.startswith(PIPE) or re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def shown_url(url: str) -> str:
    """A URL for messages, without passwords and keys."""
    if url.startswith(PIPE):
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=parts.query and "..."))


def shown_path(data_path: str) -> str:
    """A data path for messages, as `shown_url`."""
    return "::".join(shown_url(part) if is_url(part) else part for part in data_path.split("::"))


def expand_shards(data_path: str, flag: str = "--data-path") -> list[Address]:
    """Shards of a data path, ordered as ``--no-shuffle`` reads them.

    A path is a file, a folder (its ``*.tar``, sorted), braces (``dir/train-{00000..00009}.tar``), a glob (sorted), or a
    URL with or without braces. ``::`` joins paths, as in webdataset.

    Raises:
        ValueError: a shard is missing or named twice, there are none or too many, or a command is hidden.
    """
    parts: list[str] = []
    for pattern in data_path.split("::"):
        parts += _expand_pattern(pattern, flag)
    shards: list[Address] = []
    for part in parts:
        part = part.removeprefix("file://").removeprefix("file:")
        shards += [part] if is_url(part) else _expand_files(part, flag)
    commands = [each for each in shards if isinstance(each, str) and each.startswith(PIPE)]
    # A file of --config may name no command: its text was searched for `pipe:`, before this expansion.
    if commands and not names_command(data_path):
        raise ValueError(
            f"{flag} {data_path!r} becomes the command {commands[0]!r}: write {PIPE} out on the command line, and not "
            "by a variable, braces or file:"
        )
    if len(set(shards)) < len(shards):
        raise ValueError(f"{flag} {shown_path(data_path)} names a shard more than once")
    return shards


def _expand_pattern(pattern: str, flag: str) -> list[str]:
    """Expands variables and braces by webdataset's rules."""
    from webdataset import shardlists  # imports torch

    for name in re.findall(r"\$\{(\w+)\}", pattern):
        if f"WDS_{name}" not in os.environ:
            raise ValueError(
                f"{flag} {shown_path(pattern)!r} names ${{{name}}}, and the environment variable WDS_{name} is not "
                "set: set it (webdataset puts WDS_ before the name), or let the shell expand its own variables"
            )
    expanded = shardlists.envsubst(pattern)
    too_many = f"{flag} {shown_path(pattern)!r} names more than {MOST_SHARDS:,} shards; make larger ones"
    if _longest_range(expanded) > MOST_SHARDS:
        raise ValueError(too_many)
    try:
        parts = list(islice(braceexpand(expanded), MOST_SHARDS + 1))
    except ValueError as error:
        raise ValueError(f"{flag} {pattern!r} has unbalanced braces: {error}") from error
    if len(parts) > MOST_SHARDS:
        raise ValueError(too_many)
    return parts


def _longest_range(pattern: str) -> int:
    # braceexpand makes all numbers of {first..last} or {first..last..step} at once.
    longest = 0
    for first, last, step in re.findall(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}", pattern):
        longest = max(longest, abs(int(last) - int(first)) // max(int(step or 1), 1) + 1)
    return longest


def _expand_files(path: str, flag: str) -> list[Path]:
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        return _shards_in(Path(path), flag)
    found = [Path(path)]
    if glob.has_magic(path) and not os.path.exists(path):
        found = sorted(Path(each) for each in glob.glob(path))
    if not found:
        raise ValueError(f"{flag} {path!r} matches no file")
    for shard in found:
        if shard.is_dir():
            raise ValueError(f"{flag}: {path!r} matches the folder {shard}; name shards, {shard}/*.tar")
        _require_shard(shard, flag)
    return found


def _shards_in(folder: Path, flag: str) -> list[Path]:
    names = sorted(glob.glob("*.tar", root_dir=folder))  # without hidden files
    if not names:
        raise ValueError(
            f"{flag}: the folder {folder} holds no shards (*.tar); tools/preprocess_data.py makes them from a data set"
        )
    found = [folder / name for name in names]
    for shard in found:
        _require_shard(shard, flag)
    return found


def _require_shard(shard: Path, flag: str) -> None:
    if not shard.exists():
        raise ValueError(f"{flag}: {shard} does not exist")
    if not shard.is_file():
        # A pipe would wait for its other end, and a device may never end.
        raise ValueError(f"{flag}: {shard} is no regular file; a shard is a tar file")
