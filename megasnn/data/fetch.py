"""Shards behind URLs: fetched into the cache, once a host, and named there by URL and size.

`http(s)` goes by requests, what follows ``pipe:`` is a command that webdataset starts, and all other schemes (s3, gs,
hf, ...) go by fsspec, which names the package that it needs for one.
"""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import fsspec
import requests

from megasnn.cache import build_once, cache_folder, name_in_cache
from megasnn.data.index import INDEX_NAME, Index, ShardRecord, parse_index, sha256_of
from megasnn.data.shards import Shard, is_packed, open_shard, unpack
from megasnn.telemetry.log import byte_bar

PIPE = "pipe:"
"""Begins a command whose output is a shard. Only a command line may give one."""
_HTTP = ("http://", "https://")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_AT_A_TIME = 4
_TRIES = 3
_BLOCK = 1 << 20
_SIGN_SECONDS = 30.0
_PATIENCE_SECONDS = 86400.0  # for another process of this host that fetches the shard: it gives up by itself
_CONNECTION_SECONDS = 86400.0  # the limit is that of `_watched`
_MAY_PASS = (408, 425, 429)
Item = TypeVar("Item")


class FetchError(ValueError):
    """What a URL stands for cannot be had. The message names the URL and what to do."""


@dataclass(frozen=True)
class RemoteShard:
    """A shard behind a URL.

    Attributes:
        size: in bytes; None where its source does not say it.
        record: of the index.json in its folder; None where there is none.
    """

    url: str
    size: int | None
    record: ShardRecord | None


def is_url(text: str) -> bool:
    """Tell whether this is fetched; a path otherwise."""
    return text.startswith(PIPE) or _SCHEME.match(text) is not None


def shown(url: str) -> str:
    """A URL for messages, without the passwords and keys in it."""
    if url.startswith(PIPE):
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=parts.query and "..."))


def describe_remote(urls: Sequence[str], seconds: float) -> list[RemoteShard]:
    """Asks for the sizes of shards, and for the index.json in their folders.

    Args:
        seconds: of silence after which a source is given up.
    Raises:
        FetchError: one is not there, or its source does not answer. ValueError: an index.json makes no sense.
    """
    records: dict[str, dict[str, ShardRecord]] = {}
    for url in urls:
        folder = url.partition("?")[0].rpartition("/")[0]
        if not url.startswith(PIPE) and folder not in records:
            index = _remote_index(f"{folder}/{INDEX_NAME}", seconds)
            records[folder] = {record.file: record for record in index.shards} if index else {}

    def describe(url: str) -> RemoteShard:
        if url.startswith(PIPE):
            return RemoteShard(url, None, None)
        folder, _, file = url.partition("?")[0].rpartition("/")
        if record := records[folder].get(file):
            return RemoteShard(url, record.size, record)
        (size,) = _persist(url, lambda: list(_watched(url, seconds, lambda: _sizes(url))))
        return RemoteShard(url, None if size < 0 else size, None)

    with ThreadPoolExecutor(4 * _AT_A_TIME) as pool:
        return list(pool.map(describe, urls))


def open_remote(shards: Sequence[RemoteShard], seconds: float) -> list[Shard]:
    """Fetches the shards that the cache lacks, a few at a time, and opens all.

    Args:
        seconds: of silence after which a source is given up.
    Raises:
        FetchError: one cannot be fetched, or is not what index.json says. ValueError: as `open_shard`.
        CacheError: it cannot be written.
    """
    missing = [each for each in shards if not _target(each).exists()]
    total = sum(each.size or 0 for each in missing) if all(each.size for each in missing) else None
    quiet = not missing or os.environ.get("LOCAL_RANK", "0") != "0"
    with byte_bar("fetching shards", total, quiet=quiet) as bar, ThreadPoolExecutor(_AT_A_TIME) as pool:
        list(pool.map(lambda each: _provide(each, seconds, bar.update), missing))
    return [_opened(each) for each in shards]


def _opened(remote: RemoteShard) -> Shard:
    target = _target(remote)
    try:
        return open_shard(target, shown(remote.url), remote.record)
    except ValueError:
        target.unlink(missing_ok=True)  # the next run fetches it anew
        raise


def _target(remote: RemoteShard) -> Path:
    """Place in the cache. It is another one where size or checksum have changed."""
    name = "pipe" if remote.url.startswith(PIPE) else PurePosixPath(urlsplit(remote.url).path).name
    version = str(remote.size), remote.record.sha256 if remote.record else ""
    return cache_folder("shards") / name_in_cache(name, ".tar", remote.url, *version)


def _provide(remote: RemoteShard, seconds: float, arrived: Callable[[int], object]) -> None:
    def fetch(path: Path) -> None:
        packed = path.with_name(f"{path.name}.arriving")
        try:
            _persist(remote.url, lambda: _download(remote.url, packed, seconds, arrived))
            _check(remote, packed)
            if is_packed(packed):
                unpack(packed, path, shown(remote.url))
            else:
                os.replace(packed, path)
        finally:
            packed.unlink(missing_ok=True)

    build_once(_target(remote), fetch, _PATIENCE_SECONDS)


def _check(remote: RemoteShard, file: Path) -> None:
    """Raises FetchError for a file that is not what its source, or index.json, says."""
    found, record = file.stat().st_size, remote.record
    if remote.size is not None and found != remote.size:
        raise FetchError(f"{shown(remote.url)} has {found} bytes, and should have {remote.size}: it was cut or changed")
    if record is not None and (checksum := sha256_of(file)) != record.sha256:
        raise FetchError(
            f"{shown(remote.url)} has the sha256 {checksum}, and {INDEX_NAME} beside it says {record.sha256}: it was "
            "changed where it lies; upload both again"
        )


def _remote_index(url: str, seconds: float) -> Index | None:
    try:
        content = _persist(url, lambda: b"".join(_watched(url, seconds, lambda: _blocks(url))))
    except FetchError as error:
        if isinstance(error.__cause__, FileNotFoundError | PermissionError):  # S3 refuses what it may not list
            return None
        raise
    return parse_index(content, shown(url))


def _persist(url: str, action: Callable[[], Any]) -> Any:
    """Result of an action on a URL. It is tried again where what it raises may pass.

    Raises:
        FetchError: it is given up.
    """
    for attempt in range(1, _TRIES + 1):
        try:
            return action()
        except Exception as error:  # each of the packages behind fsspec has its own
            final = isinstance(error, FileNotFoundError | PermissionError | ImportError | ValueError | TimeoutError)
            if final or attempt == _TRIES:
                raise FetchError(f"cannot fetch {shown(url)}: {_reason(error, url)}") from error
            time.sleep(attempt)


def _reason(error: Exception, url: str) -> str:
    """The text of an error, without passwords and keys of URLs."""
    text = re.sub(r"//[^/@\s]*@", "//", str(error).replace(url, shown(url)))
    text = re.sub(r"[?][^\s)]+", "?...", text)
    return f"{type(error).__name__}: {text[:300]}"


def _download(url: str, path: Path, seconds: float, arrived: Callable[[int], object]) -> None:
    count = 0
    try:
        with open(path, "wb") as file:
            for block in _watched(url, seconds, lambda: _blocks(url)):
                file.write(block)
                count += len(block)
                arrived(len(block))
    except BaseException:
        arrived(-count)
        raise


def _watched(url: str, seconds: float, produce: Callable[[], Iterator[Item]]) -> Iterator[Item]:
    """What `produce` gives, as it comes in another thread: not every source knows a timeout.

    Raises:
        TimeoutError: nothing has come for so many seconds; and what `produce` raises.
    """
    items: queue.Queue[tuple[Item | None, Exception | None]] = queue.Queue(4)
    given_up = threading.Event()

    def receive() -> None:
        try:
            for item in produce():
                items.put((item, None))
                if given_up.is_set():
                    return
            items.put((None, None))
        except Exception as error:
            items.put((None, error))

    threading.Thread(target=receive, name="megasnn-fetch", daemon=True).start()
    heard = time.monotonic()
    while True:
        left = heard + seconds - time.monotonic()
        try:
            item, error = items.get(timeout=max(0.0, min(left, _SIGN_SECONDS)))
        except queue.Empty:
            silent = time.monotonic() - heard
            if silent >= seconds:
                given_up.set()
                raise TimeoutError(f"nothing has come for {seconds:g} s (--fetch-timeout)") from None
            sys.stderr.write(f"waiting for {shown(url)} since {silent:.0f} s, for at most {seconds:g} s\n")
            continue
        if error is not None:
            raise error
        if item is None:
            return
        heard = time.monotonic()
        yield item


def _blocks(url: str) -> Iterator[bytes]:
    """The content of what a URL stands for."""
    if url.startswith(PIPE):
        from webdataset.gopen import gopen  # imports torch

        stream: Any = gopen(url, "rb")
    elif url.startswith(_HTTP):
        stream = _http(url).raw  # ends with an error where less comes than the server has announced
    else:
        stream = fsspec.open(url, "rb").open()
    with closing(stream):
        yield from iter(lambda: stream.read(_BLOCK), b"")


def _sizes(url: str) -> Iterator[int]:
    """The size of what a URL stands for in bytes, or -1 where its source does not say it."""
    if url.startswith(_HTTP):
        with closing(_http(url)) as response:
            yield int(response.headers.get("Content-Length", -1))
    else:
        system, path = fsspec.core.url_to_fs(url)
        size = system.size(path)
        yield -1 if size is None else int(size)


def _http(url: str) -> Any:
    """An answer of http(s) whose content has not been read; redirects are followed to http(s) only.

    Raises:
        FileNotFoundError, PermissionError: the server has no such file, or none for this user.
        OSError: another answer than the file, or none.
    """
    response = requests.get(url, stream=True, timeout=_CONNECTION_SECONDS, headers={"Accept-Encoding": "identity"})
    if response.status_code >= 400:
        response.close()
        said = f"the server answers {response.status_code} ({response.reason})"
        if response.status_code in (404, 410):
            raise FileNotFoundError(f"{said}; correct the address, braces and numbers too")
        if response.status_code < 500 and response.status_code not in _MAY_PASS:
            raise PermissionError(f"{said}; see that it may be read")
        raise OSError(said)
    return response
