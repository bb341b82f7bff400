"""Shards behind URLs: fetched once a host, checked, and named where they cannot be had."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from unittest import mock

import fsspec
import pytest

from megasnn.data.datasets import ShardDataset, open_shards
from megasnn.data.images import ImageFormat
from megasnn.data.remote import FetchError, expand_shards
from megasnn.data.shards import opened_file
from tests.data.shard_files import CLASSES, numbered, open_all, write_shard, write_shards
from tests.data.shard_server import serving

BRACES = "train-{00000..00002}.tar"


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "served").mkdir()
    write_shards(tmp_path / "served", samples=9, per_shard=3)
    return tmp_path / "served"


@pytest.fixture
def server(folder, monkeypatch):
    monkeypatch.setattr("megasnn.data.remote._PAUSE_SECONDS", 0.05)
    with serving(folder) as running:
        yield running


def opened(url: str) -> ShardDataset:
    return ShardDataset(open_shards(expand_shards(url)), ImageFormat(8, 1), CLASSES)


def samples(dataset: ShardDataset) -> list[int]:
    return [int(dataset.sample(index)[0, 0, 0]) for index in range(len(dataset))]


def in_cache(cache: Path) -> list[str]:
    return [path.name for path in cache.glob("shards/*") if not path.name.endswith(".lock")]


def _open_on_a_rank(url: str, cache: str) -> list[int] | str:
    os.environ["MEGASNN_CACHE"] = cache
    return samples(opened(url))


def test_samples_are_those_of_local_files_and_a_host_fetches_each_shard_once(ranks, folder, server, cache):
    names = [path.name for path in sorted(folder.glob("*.tar"))]
    for _ in range(2):
        dataset = opened(server.url(BRACES))
        assert samples(dataset) == list(range(9))
        assert dataset.fingerprint() == open_all(sorted(folder.glob("*.tar"))).fingerprint()
    assert sorted(server.asked) == sorted(names * 3), "each of the two runs asks for the sizes"
    shutil.rmtree(cache)
    server.asked.clear()
    assert ranks(3, _open_on_a_rank, server.url(BRACES), str(cache)) == [list(range(9))] * 3
    assert sorted(server.asked) == sorted(names * 4)
    write_shard(folder / names[0], numbered(range(20, 32)))
    dataset = opened(server.url(BRACES))
    assert samples(dataset) == [*range(20, 32), *range(3, 9)], "a shard of another size is fetched anew"
    shutil.rmtree(cache / "shards")
    with pytest.raises(ValueError, match=re.escape(f"'s007' of shard {server.url('train-00002.tar')}")):
        opened_file.cache_clear()
        dataset.sample(16)


def test_a_server_that_breaks_off_is_asked_again_and_one_that_truncates_or_stalls_is_named(server, cache, monkeypatch):
    server.cuts, server.statuses = [10**6] * 3 + [500, 700], [503]
    assert samples(opened(server.url(BRACES))) == list(range(9))
    shutil.rmtree(cache)
    url = server.url("train-00000.tar")
    server.cuts = [10**6, 500, 500, 500]
    with pytest.raises(FetchError, match=re.escape(url)):
        opened(url)
    server.silent = 2.0
    monkeypatch.setattr("megasnn.data.remote._SILENCE_SECONDS", 0.2)
    with pytest.raises(FetchError, match=f"{re.escape(url)}.*timed out"):
        opened(url)
    assert not in_cache(cache)


@pytest.mark.parametrize("status", [403, 404, 500])
def test_refusals_of_the_server_are_named_without_secrets(server, status):
    server.statuses = [status] * 9
    url = server.url("train-00000.tar?token=secret").replace("//", "//me:secret@")
    with pytest.raises(FetchError, match=f"{server.url('train-00000.tar')}.*{status}") as caught:
        opened(url)
    assert "secret" not in str(caught.value) and server.authorizations[-1] is not None
    assert len(server.asked) == (3 if status == 500 else 1)


def test_redirects_pages_and_servers_without_a_length(tmp_path, folder, server, cache):
    with serving(tmp_path) as first:
        first.leads_to = server.url("train-00001.tar")
        assert samples(opened(first.url("any.tar"))) == [3, 4, 5]
        first.leads_to = f"ftp://localhost{folder}/train-00001.tar"
        with pytest.raises(FetchError, match="ftp:"):
            opened(first.url("other.tar"))
    shutil.rmtree(cache)
    (folder / "page.tar").write_text("<!DOCTYPE html><title>Sign in</title>" * 40)
    with pytest.raises(ValueError, match=re.escape(server.url("page.tar"))):
        opened(server.url("page.tar"))
    assert not in_cache(cache)
    server.has_length = False
    assert samples(opened(server.url("train-00002.tar"))) == [6, 7, 8]


def test_commands_and_object_stores(folder, cache, monkeypatch):
    """fsspec's file system in memory stands for s3, gs and hf, which need a package each."""
    monkeypatch.setattr("megasnn.data.remote._TRIES", 1)
    assert samples(opened(f"pipe:cat {folder}/{BRACES}")) == list(range(9))
    with pytest.raises(FetchError, match="pipe:cat .*none.tar"):
        opened(f"pipe:cat {folder}/none.tar")
    store = fsspec.filesystem("memory")
    for path in folder.iterdir():
        store.pipe(f"/bucket/{path.name}", path.read_bytes())
    assert samples(opened(f"memory://bucket/{BRACES}")) == list(range(9))
    for url in ("memory://bucket/none.tar", "nowhere://host/"):
        with pytest.raises(FetchError, match=url):
            opened(url)


@pytest.mark.parametrize("header", ["ETag", "Last-Modified"])
def test_a_shard_of_the_same_size_is_fetched_anew_where_the_server_tells_another_version(folder, server, header):
    url = server.url("train-00000.tar")
    server.version = {header: "one"}
    assert samples(opened(url)) == samples(opened(url)) == [0, 1, 2]
    before = (folder / "train-00000.tar").stat().st_size
    assert write_shard(folder / "train-00000.tar", numbered(range(3, 6))).stat().st_size == before
    assert samples(opened(url)) == [0, 1, 2], "the server tells of no change"
    server.version = {header: "two"}
    assert samples(opened(url)) == [3, 4, 5]


def test_object_stores_tell_the_time_of_a_change(folder):
    store = fsspec.filesystem("memory")
    for numbers in ([0, 1, 2], [3, 4, 5]):
        shard = write_shard(folder / "a.tar", numbered(range(numbers[0], numbers[0] + 3)))
        store.pipe("/bucket/same.tar", shard.read_bytes())
        assert samples(opened("memory://bucket/same.tar")) == numbers


@pytest.mark.parametrize("error", [NotImplementedError, KeyError("mtime")])
def test_a_store_without_times_of_change_still_names_a_missing_shard(folder, monkeypatch, error):
    store = fsspec.filesystem("memory")
    monkeypatch.setattr(type(store), "modified", mock.Mock(side_effect=error))
    store.pipe("/bucket/timeless.tar", (folder / "train-00001.tar").read_bytes())
    assert samples(opened("memory://bucket/timeless.tar")) == [3, 4, 5]
    with pytest.raises(FetchError, match=r"memory://bucket/gone\.tar: FileNotFoundError"):
        opened("memory://bucket/gone.tar")
