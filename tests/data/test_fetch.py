"""Shards behind URLs: fetched once a host, checked, and named with what is wrong where they cannot be had."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import fsspec
import pytest

from megasnn.cache import CacheError
from megasnn.data.dataset import ShardDataset
from megasnn.data.datasets import open_shards
from megasnn.data.fetch import FetchError
from megasnn.data.images import ImageFormat
from megasnn.data.paths import expand_shards
from tests.data.shard_files import CLASSES, numbered, open_all, write_shard, write_shards
from tests.data.shard_server import serving

BRACES = "train-{00000..00002}.tar"


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "served").mkdir()
    write_shards(tmp_path / "served", samples=9, per_shard=3)
    return tmp_path / "served"


@pytest.fixture
def server(folder):
    with serving(folder) as running:
        yield running


def write_index(folder: Path, **changes: object) -> None:
    shards = [
        {
            "file": path.name,
            "split": "train",
            "samples": 3,
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "broken": [],
        }
        | changes
        for path in sorted(folder.glob("*.tar"))
    ]
    content = {"version": 1, "options": {}, "classes": ["a", "b", "c"], "shards": shards}
    (folder / "index.json").write_text(json.dumps(content))


def opened(url: str, seconds: float = 10.0) -> ShardDataset:
    return ShardDataset(open_shards(expand_shards(url), seconds), ImageFormat(8, 1), CLASSES)


def samples(dataset: ShardDataset) -> list[int]:
    return [int(dataset.sample(index)[0, 0, 0]) for index in range(len(dataset))]


def in_cache(cache: Path) -> list[str]:
    return [path.name for path in cache.glob("shards/*") if not path.name.endswith(".lock")]


@pytest.mark.parametrize("has_index", [False, True])
def test_the_samples_are_those_of_local_files_and_each_shard_is_fetched_once(folder, server, has_index):
    if has_index:
        write_index(folder)
    for _ in range(2):
        dataset = opened(server.url(BRACES))
        assert samples(dataset) == list(range(9))
        assert dataset.fingerprint() == open_all(sorted(folder.glob("*.tar"))).fingerprint()
    times = 1 if has_index else 3  # without an index each of the two runs asks for the sizes
    assert sorted(server.asked) == sorted([path.name for path in folder.glob("*.tar")] * times)


def _open_on_a_rank(url: str, cache: str) -> list[int] | str:
    os.environ["MEGASNN_CACHE"] = cache
    try:
        return samples(opened(url))
    except ValueError as error:
        return str(error)


def test_ranks_of_a_host_fetch_a_shard_once(ranks, folder, server, cache):
    write_index(folder)
    assert ranks(3, _open_on_a_rank, server.url(BRACES), str(cache)) == [list(range(9))] * 3
    assert sorted(server.asked) == sorted(path.name for path in folder.glob("*.tar"))


def test_what_breaks_off_or_may_pass_is_fetched_again(folder, server):
    write_index(folder)
    server.cuts, server.statuses = [500, 700], [503]
    assert samples(opened(server.url(BRACES))) == list(range(9))


@pytest.mark.parametrize(("has_index", "cuts"), [(True, [500] * 3), (False, [10**6, 500, 500, 500])])
def test_a_server_that_truncates_is_named_and_leaves_nothing(folder, server, cache, has_index, cuts):
    if has_index:
        write_index(folder)
    server.cuts = cuts
    with pytest.raises(FetchError, match=re.escape(server.url("train-00000.tar"))):
        opened(server.url("train-00000.tar"))
    assert not in_cache(cache)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_server_that_stalls_is_spoken_of_and_given_up(folder, server, cache, capfd, monkeypatch, has_index):
    monkeypatch.setattr("megasnn.data.fetch._SIGN_SECONDS", 0.2)
    if has_index:
        write_index(folder)
    server.silent = 5.0
    with pytest.raises(FetchError, match="--fetch-timeout"):
        opened(server.url("train-00000.tar"), seconds=1.0)
    assert f"waiting for {server.url('train-00000.tar')}" in capfd.readouterr().err and not in_cache(cache)


@pytest.mark.parametrize("status", [400, 403, 404, 500])
def test_refusals_of_the_server_are_named(server, status):
    server.statuses = [status] * 9
    with pytest.raises(FetchError) as caught:
        opened(server.url("train-00000.tar"))
    assert server.url("train-00000.tar") in str(caught.value) and str(status) in str(caught.value)
    assert len(server.asked) == (3 if status == 500 else 1)


def test_a_redirect_is_followed_within_http_only(tmp_path, folder, server):
    with serving(tmp_path) as first:
        first.leads_to = server.url("train-00001.tar")
        assert samples(opened(first.url("any.tar"))) == [3, 4, 5]
        first.leads_to = f"ftp://localhost{folder}/train-00001.tar"
        with pytest.raises(FetchError, match="ftp:"):
            opened(first.url("other.tar"))


def test_a_page_instead_of_a_shard_is_named_and_not_kept(folder, server, cache):
    (folder / "page.tar").write_text("<!DOCTYPE html><title>Sign in</title>" * 40)
    with pytest.raises(ValueError, match=re.escape(server.url("page.tar"))):
        opened(server.url("page.tar"))
    assert not in_cache(cache)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"size": 7}, "should have 7"), ({"sha256": "0" * 64}, "sha256"), ({"samples": 4}, "4"), ({"size": -1}, "size")],
)
def test_what_is_not_as_index_json_says_is_refused(folder, server, cache, changes, named):
    write_index(folder, **changes)
    with pytest.raises(ValueError, match=named):
        opened(server.url("train-00000.tar"))
    assert not in_cache(cache)


def test_secrets_in_urls_reach_the_server_and_no_message(folder, server):
    url = server.url("train-00000.tar?token=secret").replace("//", "//me:secret@")
    assert samples(opened(url)) == [0, 1, 2] and server.authorizations[-1] is not None
    server.statuses = [403] * 3
    with pytest.raises(FetchError) as caught:
        opened(url.replace("00000", "00001"))
    assert "secret" not in str(caught.value)
    with pytest.raises(FetchError) as caught:
        opened("http://me:secret@127.0.0.1:1/a.tar?token=secret")
    assert "secret" not in str(caught.value) and "127.0.0.1:1" in str(caught.value)


def test_packed_shards_and_servers_that_tell_no_length(tmp_path, folder, server):
    write_shard(folder / "packed.tar.gz", numbered(range(4)))
    server.has_length = False
    assert samples(opened(server.url("packed.tar.gz"))) == [0, 1, 2, 3]
    assert samples(opened(server.url("train-00002.tar"))) == [6, 7, 8]


def test_the_output_of_a_command(folder, cache):
    assert samples(opened(f"pipe:cat {folder}/{BRACES}")) == list(range(9))
    with pytest.raises(FetchError, match="pipe:cat .*none.tar"):
        opened(f"pipe:cat {folder}/none.tar")
    with pytest.raises(FetchError, match="pipe:sleep 9.*--fetch-timeout"):
        opened("pipe:sleep 9", seconds=0.5)
    assert len(in_cache(cache)) == 3


@pytest.mark.parametrize("has_index", [False, True])
def test_object_stores_by_fsspec(folder, has_index):
    """Its file system in memory stands for s3, gs and hf, which need a package each."""
    if has_index:
        write_index(folder)
    store = fsspec.filesystem("memory")
    for path in folder.iterdir():
        store.pipe(f"/bucket-{has_index}/{path.name}", path.read_bytes())
    assert samples(opened(f"memory://bucket-{has_index}/{BRACES}")) == list(range(9))
    with pytest.raises(FetchError, match="memory://bucket/none.tar"):
        opened("memory://bucket/none.tar")
    with pytest.raises(FetchError, match="nowhere://host/"):
        opened("nowhere://host/a.tar")


def test_a_full_disk_says_what_to_change(folder, server, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CacheError, match="No space left.*MEGASNN_CACHE"):
        opened(server.url("train-00000.tar"))


def test_a_fetched_shard_that_is_removed_while_in_use_is_named(server, cache):
    dataset = opened(server.url(BRACES))
    shutil.rmtree(cache / "shards")
    with pytest.raises(ValueError, match=re.escape(f"'s004' of shard {server.url('train-00001.tar')}")):
        dataset.sample(4)
