"""Shards that are fetched in threads while others are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

from megasnn.data.remote.shard import RemoteShard


class ShardsAhead:
    """Fetches shards before they are needed, `most` at a time. Close it to end what is still being fetched.

    Args:
        arrived: is told how many bytes have come.
    """

    def __init__(self, most: int, arrived: Callable[[int], object] = lambda count: None) -> None:
        self._most, self._arrived = most, arrived
        self._stop = threading.Event()
        self._begun: dict[Path, Future[Path]] = {}

    def begin(self, shards: Iterable[RemoteShard]) -> None:
        """Begins to fetch the first ones that are missing in the cache. What fails is told to those who need it."""
        # Failures stay: those who need the shard are told, and need not find out for themselves.
        self._begun = {tar: each for tar, each in self._begun.items() if not each.done() or each.exception()}
        running = sum(not each.done() for each in self._begun.values())
        for shard in shards:
            if running >= self._most:
                return
            if (tar := shard.tar) not in self._begun and not tar.exists():
                running += 1
                self._begun[tar] = future = Future[Path]()
                # A daemon: a run that ends does not wait for it.
                threading.Thread(target=self._fetch, args=(shard, future), name="megasnn-fetch", daemon=True).start()

    def provide(self, shard: RemoteShard) -> Path:
        """Gives the file of a shard in the cache. Raises what `RemoteShard.provide` raises."""
        begun = self._begun.pop(shard.tar, None)
        return shard.provide(self._stop, self._arrived) if begun is None else begun.result()

    def close(self) -> None:
        self._stop.set()

    def _fetch(self, shard: RemoteShard, future: Future[Path]) -> None:
        try:
            future.set_result(shard.provide(self._stop, self._arrived))
        except BaseException as error:
            future.set_exception(error)
