"""All shards of a data path: their indexes, for which those behind URLs are fetched, a few ahead of the one at hand."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from megasnn.cache.room import LIMIT, cache_limit
from megasnn.data.index import Index, read_index
from megasnn.data.paths import Address
from megasnn.data.remote.address import beside, file_name
from megasnn.data.remote.ahead import ShardsAhead
from megasnn.data.remote.shard import FetchOptions, RemoteShard, remote_index
from megasnn.data.shards import Shard, index_of_remote, open_remote_shard, open_shard
from megasnn.telemetry.log import byte_bar

Decide = Callable[[Callable[[], Index | None]], Index | None]
"""Calls what reads an index.json, on one rank where there are several; all of them are given what that has found."""


def by_itself(read: Callable[[], Index | None]) -> Index | None:
    """Of a process that agrees with no other one."""
    return read()


def open_shards(
    addresses: Sequence[Address],
    suffixes: tuple[str, ...],
    limit: int,
    options: FetchOptions,
    decide: Decide = by_itself,
) -> list[Shard]:
    """The shards of a data path with their indexes, in order.

    Args:
        suffixes, limit: as of `open_shard`.
        decide: whether the shards behind URLs have an index.json, and which: a program may fail on one rank alone.
    Raises:
        ValueError: as `open_shard`; one cannot be fetched.
    """
    remotes = _remote_shards([each for each in addresses if isinstance(each, str)], options, decide)
    missing = [each for each in remotes.values() if not index_of_remote(each, suffixes, limit).exists()]
    shards = []
    with _bar(missing) as bar, closing(ShardsAhead(options.ahead, bar.update)) as ahead:
        for address in addresses:
            if isinstance(address, Path):
                shards.append(open_shard(address, suffixes, limit, options.unpacked_limit))
                continue
            remote = remotes[address]
            if remote in missing[:1]:
                ahead.begin(missing[: options.ahead])
                del missing[0]
            shards.append(open_remote_shard(remote, suffixes, limit, ahead.provide))
    _warn_of_small_cache(shards)
    return shards


def index_of(address: Address) -> Index | None:
    """The index.json beside a shard; None where there is none. Raises ValueError where it cannot be read."""
    return read_index(address.parent) if isinstance(address, Path) else remote_index(address, FetchOptions())


def _remote_shards(urls: Sequence[str], options: FetchOptions, decide: Decide) -> dict[str, RemoteShard]:
    """The shards behind URLs, with what index.json in their folder says of them: it is read once for a folder."""
    indexes: dict[str | None, Index | None] = {}
    found = {}
    for url in urls:
        folder = beside(url, "")
        if folder not in indexes:
            indexes[folder] = decide(partial(remote_index, url, options))
        index = indexes[folder]
        records = {record.file: record for record in index.shards} if index else {}
        found[url] = RemoteShard(url, records.get(file_name(url)), options)
    return found


def _bar(missing: Sequence[RemoteShard]):
    """Of the bytes that are fetched; one process of a node shows it."""
    sizes = [each.record.size for each in missing if each.record is not None]
    total = sum(sizes) if len(sizes) == len(missing) else None
    return byte_bar("fetching shards", total, quiet=not missing or os.environ.get("LOCAL_RANK", "0") != "0")


def _warn_of_small_cache(shards: Sequence[Shard]) -> None:
    size, room = sum(int(shard.length) for shard in shards if shard.remote is not None), cache_limit()
    if size > room and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(
            f"WARNING: the fetched shards take {size / 1e9:.3g} GB, and the cache holds {room / 1e9:.3g}: shards are "
            f"removed and fetched again, with shuffling all the time; raise {LIMIT}\n"
        )
