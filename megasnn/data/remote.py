"""Shards of a data path: braces, globs, lists, and URLs that are fetched into the cache once a host.

``http(s)`` goes by requests, a command after ``pipe:`` by webdataset's gopen, and all other schemes (s3, gs, hf, ...)
by fsspec, which names the package that it needs for one.

A fetched shard is named by its URL, its size, and the version that its source tells.
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

_HTTP = ("http://", "https://")
_AT_A_TIME = 4
_TRIES, _PAUSE_SECONDS = 3, 1.0
_SILENCE_SECONDS = 60.0  # of an http server
_FINAL = (FileNotFoundError, ImportError, ValueError)  # not tried again
_T = TypeVar("_T")
Address = Path | str
"""A shard: a file, or the text of a URL."""


class FetchError(ValueError):
    """A URL cannot be fetched. The message names the URL and what to do."""


class RemoteShard(NamedTuple):
    """A shard behind a URL.

    Attributes:
        size: in bytes; None where its source does not say it.
        version: of its content, as its source tells it: an ETag or a time of change; "" where it tells none.
    """

    url: str
    size: int | None
    version: str = ""

    @property
    def target(self) -> Path:
        """Place in the cache; another one where the size or the version has changed."""
        name = "pipe" if self.url.startswith(PIPE) else PurePosixPath(urlsplit(self.url).path).name
        return cache_folder("shards") / name_in_cache(name, ".tar", self.url, str(self.size), self.version)


def describe_remote(urls: Sequence[str]) -> list[RemoteShard]:
    """Asks for the sizes and versions of shards. Raises FetchError: one is not there, or its source does not answer."""
    with ThreadPoolExecutor(4 * _AT_A_TIME) as pool:
        return list(pool.map(lambda url: _persist(url, partial(_describe, url)), urls))


def open_remote(shards: Sequence[RemoteShard]) -> list[TarFile]:
    """Fetches the shards that the cache lacks, a few at a time, and opens all.

    Raises:
        FetchError: one cannot be fetched. ValueError: as `open_shard`.
        CacheError: it cannot be written.
    """
    missing = [each for each in shards if not each.target.exists()]

    def fetch(remote: RemoteShard) -> None:
        build_once(remote.target, lambda path: _persist(remote.url, lambda: _download(remote, path)))

    quiet = True if not missing or os.environ.get("LOCAL_RANK", "0") != "0" else None  # None: where no terminal is
    thread_map(fetch, missing, max_workers=_AT_A_TIME, desc="fetching shards", unit=" shards", disable=quiet)
    return [_opened(each) for each in shards]


def _opened(remote: RemoteShard) -> TarFile:
    try:
        return open_shard(remote.target, shown_url(remote.url))
    except ValueError:
        remote.target.unlink(missing_ok=True)  # the next run fetches it anew
        raise


def _persist(url: str, action: Callable[[], _T]) -> _T:
    """Result of an action on a URL, tried up to three times. Raises FetchError, without passwords and keys of URLs."""
    for attempt in range(1, _TRIES + 1):
        try:
            return action()
        except Exception as error:  # each of the packages behind fsspec has its own
            if isinstance(error, _FINAL) or attempt == _TRIES:
                reason = re.sub(r"//[^/@\s]*@", "//", str(error).replace(url, shown_url(url)))
                reason = re.sub(r"[?][^\s)]+", "?...", reason)[:300]
                raise FetchError(f"cannot fetch {shown_url(url)}: {type(error).__name__}: {reason}") from error
            time.sleep(attempt * _PAUSE_SECONDS)
    raise AssertionError


def _download(remote: RemoteShard, path: Path) -> None:
    with closing(_open(remote.url)) as stream, open(path, "wb") as file:
        shutil.copyfileobj(stream, file, 1 << 20)
    if remote.size is not None and (found := path.stat().st_size) != remote.size:
        raise OSError(f"{found} bytes have come, and there should be {remote.size}: it was cut or changed")


def _open(url: str) -> Any:
    """Stream of the bytes behind a URL."""
    if url.startswith(PIPE):
        from webdataset.gopen import gopen  # imports torch

        return gopen(url, "rb")
    if url.startswith(_HTTP):
        return _http(url).raw  # ends with an error where less comes than the server has announced
    return fsspec.open(url, "rb").open()


def _describe(url: str) -> RemoteShard:
    if url.startswith(PIPE):
        return RemoteShard(url, None)
    if url.startswith(_HTTP):
        with closing(_http(url)) as response:
            length = response.headers.get("Content-Length")
            version = response.headers.get("ETag") or response.headers.get("Last-Modified", "")
            return RemoteShard(url, None if length is None else int(length), version)
    system, path = fsspec.core.url_to_fs(url)
    version = ""
    with suppress(NotImplementedError, KeyError):  # not every file system knows the time of a change
        version = str(system.modified(path))
    return RemoteShard(url, system.size(path), version)


def _http(url: str) -> requests.Response:
    """An answer of http(s) whose content has not been read; redirects are followed to http(s) only.

    Raises:
        FileNotFoundError: the server refuses. OSError: it has an error, or is silent for too long.
    """
    response = requests.get(url, stream=True, timeout=_SILENCE_SECONDS, headers={"Accept-Encoding": "identity"})
    if 400 <= response.status_code < 500:
        response.close()
        raise FileNotFoundError(f"the server answers {response.status_code} ({response.reason})")
    response.raise_for_status()
    return response


def is_url(text: str) -> bool:
    """Returns True for what is fetched, False for a path."""
    return text.startswith(PIPE) or re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def shown_url(url: str) -> str:
    """A URL for messages, without passwords and keys."""
    if url.startswith(PIPE):
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=parts.query and "..."))


def shown_path(data_path: str) -> str:
    """A data path for messages, without passwords and keys."""
    return "::".join(shown_url(part) if is_url(part) else part for part in data_path.split("::"))


def expand_shards(data_path: str, flag: str = "--data-path") -> list[Address]:
    """Shards of a data path, in the order that ``--no-shuffle`` reads them.

    A path is one of: a file; braces (``dir/train-{00000..00009}.tar``, in the order written); a glob (sorted); a URL,
    with braces. Several are joined with ``::``, as in webdataset.

    Raises:
        ValueError: a shard is missing or named twice, nothing matches, more than MOST_SHARDS are named, or what is no
            command becomes one.
    """
    parts = [part for pattern in data_path.split("::") for part in _expand_pattern(pattern, flag)]
    shards: list[Address] = []
    for part in parts:
        part = part.removeprefix("file://").removeprefix("file:")
        shards += [part] if is_url(part) else _expand_files(part, flag)
    commands = [each for each in shards if isinstance(each, str) and each.startswith(PIPE)]
    if commands and not names_command(data_path):  # a file of --config has been searched for commands by its text
        raise ValueError(
            f"{flag} {data_path!r} becomes the command {commands[0]!r}: write {PIPE} out on the command line, and not "
            "by a variable, braces or file:"
        )
    if len(set(shards)) < len(shards):
        raise ValueError(f"{flag} {shown_path(data_path)} names a shard more than once")
    return shards


def _expand_pattern(pattern: str, flag: str) -> list[str]:
    """Paths and URLs of a pattern, its variables and braces expanded as webdataset does it."""
    from webdataset import shardlists  # imports torch

    for name in re.findall(r"\$\{(\w+)\}", pattern):
        if f"WDS_{name}" not in os.environ:
            raise ValueError(
                f"{flag} {shown_path(pattern)!r} names ${{{name}}}, and the environment variable WDS_{name} is not "
                "set: set it (webdataset puts WDS_ before the name), or have the shell put in its own variables"
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
    """Numbers in the longest ``{first..last}`` or ``{first..last..step}``, all of which braceexpand makes at once."""
    longest = 0
    for first, last, step in re.findall(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}", pattern):
        longest = max(longest, abs(int(last) - int(first)) // max(int(step or 1), 1) + 1)
    return longest


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
