"""Shards behind URLs: fetched into the cache, once a host, and named there by URL and size.

``http(s)`` goes by requests, a command after ``pipe:`` by webdataset's gopen, and all other schemes (s3, gs, hf, ...)
by fsspec, which names the package that it needs for one.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import fsspec
import requests

from megasnn.cache import build_once, cache_folder, name_in_cache
from megasnn.data.paths import PIPE, shown
from megasnn.data.shards import Shard, open_shard
from megasnn.telemetry.log import byte_bar

_HTTP = ("http://", "https://")
_AT_A_TIME = 4
_TRIES, _PAUSE_SECONDS = 3, 1.0
_PATIENCE_SECONDS = 86400.0  # for another process of this host that fetches the shard: it gives up by itself
_FINAL = (FileNotFoundError, PermissionError, ImportError, ValueError)  # not tried again
T = TypeVar("T")


class FetchError(ValueError):
    """A URL cannot be fetched. The message names the URL and what to do."""


class RemoteShard(NamedTuple):
    """A shard behind a URL, and its size in bytes; None where its source does not say it."""

    url: str
    size: int | None

    @property
    def target(self) -> Path:
        """Place in the cache; another one where the size has changed."""
        name = "pipe" if self.url.startswith(PIPE) else PurePosixPath(urlsplit(self.url).path).name
        return cache_folder("shards") / name_in_cache(name, ".tar", self.url, str(self.size))


def describe_remote(urls: Sequence[str], seconds: float) -> list[RemoteShard]:
    """Asks for the sizes of shards.

    Args:
        seconds: of silence after which an http server is given up.
    Raises:
        FetchError: one is not there, or its source does not answer.
    """
    with ThreadPoolExecutor(4 * _AT_A_TIME) as pool:
        sizes = pool.map(lambda url: _persist(url, partial(_size, url, seconds)), urls)
        return list(map(RemoteShard, urls, sizes))


def open_remote(shards: Sequence[RemoteShard], seconds: float) -> list[Shard]:
    """Fetches the shards that the cache lacks, a few at a time, and opens all.

    Args:
        seconds: as for `describe_remote`.
    Raises:
        FetchError: one cannot be fetched. ValueError: as `open_shard`.
        CacheError: it cannot be written.
    """
    missing = [each for each in shards if not each.target.exists()]
    total = sum(each.size or 0 for each in missing) if all(each.size for each in missing) else None
    quiet = not missing or os.environ.get("LOCAL_RANK", "0") != "0"
    with byte_bar("fetching shards", total, quiet=quiet) as bar, ThreadPoolExecutor(_AT_A_TIME) as pool:

        def fetch(remote: RemoteShard, path: Path) -> None:
            _persist(remote.url, partial(_download, remote, path, seconds, bar.update))

        list(pool.map(lambda each: build_once(each.target, partial(fetch, each), _PATIENCE_SECONDS), missing))
    return [_opened(each) for each in shards]


def _opened(remote: RemoteShard) -> Shard:
    try:
        return open_shard(remote.target, shown(remote.url))
    except ValueError:
        remote.target.unlink(missing_ok=True)  # the next run fetches it anew
        raise


def _persist(url: str, action: Callable[[], T]) -> T:
    """Result of an action on a URL, tried up to three times. Raises FetchError, without passwords and keys of URLs."""
    for attempt in range(1, _TRIES + 1):
        try:
            return action()
        except Exception as error:  # each of the packages behind fsspec has its own
            if isinstance(error, _FINAL) or attempt == _TRIES:
                reason = re.sub(r"//[^/@\s]*@", "//", str(error).replace(url, shown(url)))
                reason = re.sub(r"[?][^\s)]+", "?...", reason)[:300]
                raise FetchError(f"cannot fetch {shown(url)}: {type(error).__name__}: {reason}") from error
            time.sleep(attempt * _PAUSE_SECONDS)
    raise AssertionError


def _download(remote: RemoteShard, path: Path, seconds: float, arrived: Callable[[int], object]) -> None:
    with closing(_open(remote.url, seconds)) as stream, open(path, "wb") as file:
        while block := stream.read(1 << 20):
            file.write(block)
            arrived(len(block))
    if remote.size is not None and (found := path.stat().st_size) != remote.size:
        raise OSError(f"{found} bytes have come, and there should be {remote.size}: it was cut or changed")


def _open(url: str, seconds: float) -> Any:
    """Stream of the bytes behind a URL."""
    if url.startswith(PIPE):
        from webdataset.gopen import gopen  # imports torch

        return gopen(url, "rb")
    if url.startswith(_HTTP):
        return _http(url, seconds).raw  # ends with an error where less comes than the server has announced
    return fsspec.open(url, "rb").open()


def _size(url: str, seconds: float) -> int | None:
    if url.startswith(PIPE):
        return None
    if url.startswith(_HTTP):
        with closing(_http(url, seconds)) as response:
            length = response.headers.get("Content-Length")
            return None if length is None else int(length)
    system, path = fsspec.core.url_to_fs(url)
    size: int | None = system.size(path)
    return size


def _http(url: str, seconds: float) -> requests.Response:
    """An answer of http(s) whose content has not been read; redirects are followed to http(s) only.

    Raises:
        FileNotFoundError, PermissionError: the server has no such file, or none for this user.
        OSError: another answer than the file, or none within so many seconds.
    """
    response = requests.get(url, stream=True, timeout=seconds, headers={"Accept-Encoding": "identity"})
    if response.status_code >= 400:
        response.close()
        said = f"the server answers {response.status_code} ({response.reason})"
        if response.status_code in (404, 410):
            raise FileNotFoundError(f"{said}; correct the address, braces and numbers too")
        if response.status_code in (400, 401, 403):
            raise PermissionError(f"{said}; see that it may be read")
        raise OSError(said)
    return response
