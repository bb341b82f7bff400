"""A shard behind a URL, of which the cache keeps an unpacked copy for as long as it has room."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from megasnn.cache import CacheError, build_once, cache_folder, name_in_cache
from megasnn.cache.room import LIMIT, cache_limit
from megasnn.data.index import INDEX_NAME, Index, ShardRecord
from megasnn.data.remote.address import beside, file_name, is_http, shown
from megasnn.data.remote.incoming import FetchError, Incoming, NotFoundError, ToolError
from megasnn.data.remote.tools import fetch_opened, is_on_hub, rewritten
from megasnn.data.unpacking import is_packed, unpack
from megasnn.files.described import LARGEST, described, open_regular

_PATIENCE_SECONDS = 86400.0  # for another process that fetches the shard: it gives up by itself where nothing comes
_TRIES = 10
_ADVICE = "it is no index of shards: make the shards again, or remove it to use them unchecked"


@dataclass(frozen=True)
class FetchOptions:
    """How shards are fetched.

    Attributes:
        ahead: how many at a time, before they are used.
        seconds: of silence after which a source counts as broken.
        unpacked_limit: bytes that a `.tar.gz` may unpack to; see `unpack`.
    """

    ahead: int = 4
    seconds: float = 60.0
    unpacked_limit: int | None = None


@dataclass(frozen=True, eq=False)
class RemoteShard:
    """A shard behind a URL.

    Attributes:
        record: what index.json beside it says of it; None where it is not checked.
    """

    url: str
    record: ShardRecord | None
    options: FetchOptions

    @property
    def name(self) -> str:
        """As messages name it."""
        return shown(self.url)

    @cached_property
    def tar(self) -> Path:
        """Where its copy lies, or will lie. Of the same URL with another checksum it is another one."""
        return cache_folder("shards") / self.cached_name(".tar")

    def cached_name(self, suffix: str, *version: str) -> str:
        """A file name that changes with the URL, with what index.json says, and with `version`."""
        return name_in_cache(file_name(self.url), suffix, self.url, self.record.sha256 if self.record else "", *version)

    def provide(
        self, stop: threading.Event | None = None, arrived: Callable[[int], object] = lambda count: None
    ) -> Path:
        """Gives the file in the cache, fetched where it is missing: by one process of a node, the others wait for it.

        Args:
            stop: ends the fetching when it is set.
            arrived: is told how many bytes have come.
        Raises:
            FetchError: it cannot be had, or is not what index.json says. CacheError: there is no room for it.
        """
        stop = stop or threading.Event()
        return build_once(
            self.tar, lambda path: self._fetch(path, stop, arrived), lasting=False, patience=_PATIENCE_SECONDS
        )

    def open(self, size: int | None = None) -> io.FileIO:
        """Opens the file in the cache; it stays readable when it is removed from there.

        Args:
            size: bytes that it had when it was indexed.
        Raises:
            as `provide`; FetchError where it has another size by now.
        """
        for _ in range(_TRIES):
            try:
                file = open_regular(self.provide())
            except FileNotFoundError:  # removed since: others have needed the room
                continue
            found = os.fstat(file.fileno()).st_size
            if size is None or found == size:
                return file
            file.close()
            raise FetchError(
                f"{self.name} had {size} bytes (unpacked) when it was indexed, and has {found} now: it was changed "
                f"while in use; start the run again, on other samples perhaps"
            )
        raise CacheError(f"{self.name} is removed from the cache as soon as it is fetched; raise {LIMIT}")

    def discard(self) -> None:
        """Removes its copy, that the next run fetches it anew."""
        self.tar.unlink(missing_ok=True)

    def _fetch(self, path: Path, stop: threading.Event, arrived: Callable[[int], object]) -> None:
        packed = path.with_name(path.name + ".arriving")
        try:
            with open(packed, "wb") as file:
                incoming = Incoming(self.name, file, *self._most(), arrived)
                _fetch(self.url, incoming, self.options.seconds, stop)
            self._check(incoming)
            if is_packed(packed):
                unpack(packed, path, self.name, self.options.unpacked_limit)
            else:
                os.replace(packed, path)
        finally:
            packed.unlink(missing_ok=True)

    def _most(self) -> tuple[int, str]:
        """Bytes that may come, and who says so."""
        room = cache_limit()
        if self.record is not None and self.record.size <= room:
            return self.record.size, f"which {INDEX_NAME} beside it says: one of the two is damaged, or of another time"
        return room, f"and the cache may hold no more; raise {LIMIT}"

    def _check(self, incoming: Incoming) -> None:
        if self.record is None:
            return
        wrong = []
        if incoming.size != self.record.size:
            wrong.append(f"{incoming.size} bytes, and {INDEX_NAME} beside it says {self.record.size}")
        elif incoming.sha256 != self.record.sha256:
            wrong.append(f"the sha256 {incoming.sha256}, and {INDEX_NAME} beside it says {self.record.sha256}")
        if wrong:
            raise FetchError(f"{self.name} has {wrong[0]}: it was cut or changed where it lies; upload both again")


def _fetch(url: str, incoming: Incoming, seconds: float, stop: threading.Event) -> None:
    url = rewritten(url)
    if is_http(url):
        from megasnn.data.remote.http import fetch_http  # workers that read files need not load it

        fetch_http(url, incoming, seconds, stop)
    elif is_on_hub(url):
        from megasnn.data.remote.hub import fetch_from_hub

        fetch_from_hub(url, incoming, seconds, stop)
    else:
        fetch_opened(url, incoming, seconds, stop)


def remote_index(url: str, options: FetchOptions) -> Index | None:
    """The index.json in the folder of a shard; None where there is none, or none that its program gives.

    Raises:
        FetchError: its server does not answer, or its program is silent. DescriptionError: it is damaged.
    """
    place = beside(url, INDEX_NAME)
    if place is None:
        return None
    content = io.BytesIO()
    incoming = Incoming(shown(place), content, LARGEST, "and an index has fewer; it is damaged")
    try:
        _fetch(place, incoming, options.seconds, threading.Event())
    except NotFoundError:
        return None
    except ToolError as error:
        _warn_once(f"WARNING: shards are not compared with {INDEX_NAME}, if there is one: {error}\n")
        return None
    return described(Index, content.getvalue(), shown(place), advice=_ADVICE)


@cache
def _warn_once(text: str) -> None:
    sys.stderr.write(text)
