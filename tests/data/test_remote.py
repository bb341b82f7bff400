"""Shards behind URLs: the same samples as of local files, fetched once, whatever goes wrong on the way."""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
import torch

from megasnn.config import ConfigError, DataConfig, parse
from megasnn.data import shard_list
from megasnn.data.remote import incoming
from megasnn.data.remote.http import TRIES
from megasnn.data.show import read_samples
from megasnn.models.model import run_config
from megasnn.models.spikformer.dimensions import Spikformer
from tests.data.shard_files import loader, numbered, open_datasets, write_shard, write_shards
from tests.data.shard_server import serving

SHAPE, CLASSES, SAMPLES, PER_SHARD = (1, 8, 8), 3, 30, 6
BRACES = "train-{00000..00004}.tar"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(incoming, "_FIRST_PAUSE", 0.001)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def folder(tmp_path) -> Path:
    shards = tmp_path / "shards"
    shards.mkdir()
    write_shards(shards, SAMPLES, PER_SHARD)
    return shards


@pytest.fixture
def server(folder):
    with serving(folder) as found:
        yield found


def write_index(folder: Path, **changes: object) -> None:
    """An index.json of all shards; `changes` are made to the record of the first one."""
    records = [
        {"file": path.name, "split": "train", "samples": PER_SHARD, "size": path.stat().st_size}
        | {"sha256": sha256(path.read_bytes()).hexdigest(), "broken": []}
        for path in sorted(folder.glob("*.tar"))
    ]
    records[0] |= changes
    content = {"version": 1, "options": {}, "classes": ["a", "b", "c"], "shards": records}
    (folder / "index.json").write_text(json.dumps(content))


def dataset(path: object, **options: object):
    return open_datasets(DataConfig(data_path=str(path), **options), SHAPE, CLASSES).train


def batches(data, position: int = 0, count: int = 6, **options):
    """Sample numbers, images and labels of each micro-batch."""
    found = loader(data, global_batch_size=8, augment="crop", **options).batches(position, count)
    return [
        (micro.sample_ids.tolist(), micro.images.clone(), micro.labels.tolist())
        for batch in found
        for micro in batch.micro_batches
    ]


def assert_same(found, expected) -> None:
    assert len(found) == len(expected)
    for (ids, images, labels), (other_ids, other_images, other_labels) in zip(found, expected, strict=True):
        assert ids == other_ids and labels == other_labels and torch.equal(images, other_images)


def cached(cache: Path) -> list[Path]:
    return [path for path in (cache / "shards").iterdir() if not path.name.startswith(".")]


@pytest.mark.parametrize("has_index", [False, True])
def test_the_samples_are_those_of_local_files_and_each_shard_is_fetched_once(folder, server, has_index):
    if has_index:
        write_index(folder)
    local, remote = dataset(folder / BRACES), dataset(server.url(BRACES))
    assert remote.fingerprint() == local.fingerprint()
    for workers in (0, 2):
        assert_same(batches(remote, num_workers=workers), batches(local))
    assert sorted(name for name, _ in server.asked) == [f"train-{number:05d}.tar" for number in range(5)]
    dataset(server.url(BRACES))
    assert len(server.asked) == 5, "what is in the cache is not fetched by the next run"


def test_a_bar_counts_the_bytes(folder, server, monkeypatch):
    write_index(folder)
    counted = []

    def bar(title: str, size: int | None, quiet: bool):
        counted.append((size, quiet))
        return nullcontext(SimpleNamespace(update=counted.append))

    monkeypatch.setattr(shard_list, "byte_bar", bar)
    server.faults.cuts = [3000]
    server.faults.ranges = False
    dataset(server.url(BRACES))
    size = sum(path.stat().st_size for path in folder.glob("*.tar"))
    assert counted[0] == (size, False) and sum(counted[1:]) == size and -3000 in counted
    dataset(server.url(BRACES))
    assert counted[-1] == (0, True), "nothing is fetched"


def test_no_more_are_fetched_at_a_time_than_allowed(server):
    server.faults.silent = 0.1
    dataset(server.url(BRACES), fetch_ahead=2)
    assert server.at_once == 2


def test_a_broken_connection_goes_on_where_it_ended(folder, server):
    size = (folder / "train-00000.tar").stat().st_size
    server.faults.always_cuts = size // 4 + 1
    dataset(server.url("train-00000.tar"))
    assert [start for _, start in server.asked] == [number * (size // 4 + 1) for number in range(4)]
    assert server.sent == size


def test_a_file_without_a_length_goes_on_too(folder, server):
    """Its length is known from the second answer on, and the file is not taken for whole before."""
    server.faults.chunked, server.faults.cuts = True, [3000, 5000]
    data = dataset(server.url("train-00000.tar"))
    assert data.fingerprint() == dataset(folder / "train-00000.tar").fingerprint()
    assert [start for _, start in server.asked] == [0, 3000, 8000]


@pytest.mark.parametrize("lacks", ["ranges", "versions"])
def test_a_server_that_cannot_go_on_starts_again(folder, server, lacks):
    setattr(server.faults, lacks, False)
    server.faults.cuts = [3000, 5000, 1000]
    data = dataset(server.url("train-00000.tar"))
    assert data.fingerprint() == dataset(folder / "train-00000.tar").fingerprint()
    assert [start for _, start in server.asked] == [0, 0, 0, 0]


def test_a_shard_that_changes_between_two_connections_is_that_of_the_second(folder, server):
    server.faults.cuts = [3000]
    server.faults.after_cut = lambda: write_shard(folder / "train-00000.tar", numbered(range(10, 16)))
    data = dataset(server.url("train-00000.tar"))
    assert [start for _, start in server.asked] == [0, 0], "what has another version is not gone on with"
    assert [data.key(index) for index in range(6)] == [f"s{number:03}" for number in range(10, 16)]
    assert [int(data.sample(index)[0, 0, 0]) for index in range(6)] == list(range(10, 16))


def test_errors_of_the_server_that_may_pass(server):
    server.faults.statuses = [500, 503, 429, 500]
    assert len(dataset(server.url("train-00000.tar"))) == PER_SHARD
    assert len(server.asked) == 5


@pytest.mark.parametrize("status", [500, 404, 403, 400])
def test_errors_of_the_server_that_do_not_pass_name_the_url_and_what_to_do(server, status):
    server.faults.statuses = [status] * 100
    url = server.url("train-00000.tar")
    with pytest.raises(
        ValueError, match=rf"cannot fetch {url}\?\.\.\.: the server answers {status} .*(run again|correct)"
    ):
        dataset(url + "?key=secret")
    assert len(server.asked) == (TRIES if status == 500 else 1)


def test_a_secret_in_a_url_is_not_shown(server):
    server.faults.statuses = [404]
    with pytest.raises(ValueError, match="cannot fetch") as error:
        dataset(server.url("train-00000.tar?key=secret").replace("//", "//user:secret@"))
    assert "secret" not in str(error.value)


def test_a_server_that_leads_elsewhere_is_followed_within_http_only(folder, server):
    with serving(folder) as other:
        server.faults.leads_to = other.url("train-00001.tar")
        assert len(dataset(server.url("train-00000.tar"))) == PER_SHARD and other.asked == [("train-00001.tar", 0)]
    server.faults.leads_to = "ftp://user:secret@127.0.0.1:1/a.tar"
    with pytest.raises(ValueError, match=r"train-00002.tar leads to ftp://127.0.0.1:1/a.tar, which is not http"):
        dataset(server.url("train-00002.tar"))
    assert len(server.asked) == 2


def test_a_server_that_is_not_there_is_named(server):
    with pytest.raises(ValueError, match=r"cannot fetch http://127.0.0.1:9/.*: ConnectionRefusedError"):
        dataset("http://127.0.0.1:9/a.tar")


@pytest.mark.parametrize(
    ("fault", "value", "message"),
    [
        ("claims", 1000, r"the connection ended after \d+ of \d+ bytes"),
        ("claims", -8000, "shard {url} is cut"),
        ("always_cuts", 2000, "the connection ended after 2000 of"),
        ("silent", 5.0, "TimeoutError|too slow"),
    ],
)
def test_a_server_that_lies_or_hangs_is_named_and_leaves_nothing(server, cache, fault, value, message):
    setattr(server.faults, fault, value)
    server.faults.ranges = False
    url = server.url("train-00001.tar")
    with pytest.raises(ValueError, match=message.format(url=url)) as error:
        dataset(url, fetch_timeout=0.2)
    assert url in str(error.value)
    assert not cached(cache)
    setattr(server.faults, fault, 0 if fault != "always_cuts" else None)
    assert len(dataset(url)) == PER_SHARD


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 5000}, r"has more than 5000 bytes, which index.json beside it says"),
        ({"size": 50000}, r"has \d+ bytes, and index.json beside it says 50000"),
        ({"sha256": "0" * 64}, r"has the sha256 [0-9a-f]+, and index.json beside it says 0000"),
        ({"samples": 7}, "holds 6 samples, index.json beside it says 7"),
    ],
)
def test_what_is_not_as_index_json_says_is_refused(folder, server, changes, message):
    write_index(folder, **changes)
    url = server.url("train-00000.tar")
    with pytest.raises(ValueError, match=message) as error:
        dataset(server.url(BRACES))
    assert url in str(error.value)


def test_a_shard_larger_than_the_cache_is_not_fetched_to_its_end(folder, server, monkeypatch):
    write_index(folder)
    size = (folder / "train-00000.tar").stat().st_size
    monkeypatch.setenv("MEGASNN_CACHE_GB", str((size - 1) / 1e9))
    with pytest.raises(ValueError, match=rf"has more than {size - 1} bytes, and the cache may hold no more; raise"):
        dataset(server.url("train-00000.tar"))


def test_the_name_of_a_shard_may_be_any(folder, server, cache):
    name = "." + 60 * "数" + ".tar"
    (folder / "train-00000.tar").rename(folder / name)
    assert len(dataset(server.url(quote(name)))) == PER_SHARD
    (kept,) = cached(cache)
    assert not kept.name.startswith(".") and len(kept.name.encode()) < 120


@pytest.mark.parametrize("has_index", [True, False])
def test_a_server_that_sends_without_end_fills_no_disk(folder, server, cache, monkeypatch, has_index):
    if has_index:
        write_index(folder)
    monkeypatch.setenv("MEGASNN_CACHE_GB", "0.0001")
    server.faults.more = 10_000_000
    with pytest.raises(ValueError, match="train-00000.tar has more than .*(index.json|raise MEGASNN_CACHE_GB)"):
        dataset(server.url("train-00000.tar"))
    assert not cached(cache)


def test_a_damaged_index_json_is_named(folder, server):
    (folder / "index.json").write_text('{"version": 9}')
    with pytest.raises(ValueError, match=r"http://127.0.0.1:\d+/index.json: .*it is no index of shards"):
        dataset(server.url(BRACES))


@pytest.mark.parametrize("workers", [0, 2])
def test_removed_shards_are_fetched_again_and_a_resumed_epoch_has_the_same_samples(
    folder, server, cache, monkeypatch, capfd, workers
):
    """The cache holds two of five shards."""
    expected = batches(dataset(folder / BRACES), count=8)
    size = (folder / "train-00000.tar").stat().st_size
    monkeypatch.setenv("MEGASNN_CACHE_GB", str(2.6 * size / 1e9))
    data = dataset(server.url(BRACES), fetch_ahead=1)
    assert "raise MEGASNN_CACHE_GB" in capfd.readouterr().err
    assert len(cached(cache)) <= 2 and len(server.asked) == 5
    assert_same(batches(data, count=8, num_workers=workers), expected)
    assert len(server.asked) > 5
    micro_batches = 3
    assert_same(batches(data, position=40, count=3, num_workers=workers), expected[5 * micro_batches :])
    for thread in threading.enumerate():  # what was fetched ahead when the last batch was handed out
        if thread.name == "megasnn-fetch":
            thread.join(30)
    for path in cached(cache):
        path.unlink()
    indexed = len(server.asked)
    again = dataset(server.url(BRACES), fetch_ahead=1)
    assert len(server.asked) == indexed, "an index needs no shard"
    assert_same(batches(again, count=8, num_workers=workers), expected)


def test_shards_that_come_next_are_fetched_before_they_are_read(folder, server, cache):
    data = dataset(server.url(BRACES), fetch_ahead=2)
    for path in cached(cache):
        path.unlink()
    del server.asked[:]
    found = loader(data, global_batch_size=3, shuffle=False).batches(0)
    next(found)
    deadline = threading.Event()
    for _ in range(500):
        if len(cached(cache)) == 2:
            break
        deadline.wait(0.01)
    assert sorted(name for name, _ in server.asked) == [f"train-{number:05d}.tar" for number in range(2)]
    found.close()


def test_a_shard_that_is_another_one_when_it_is_fetched_again(folder, server, cache):
    data = dataset(server.url("train-00000.tar"))
    for path in cached(cache):
        path.unlink()
    write_shard(folder / "train-00000.tar", numbered(range(40)))
    with pytest.raises(ValueError, match=r"train-00000.tar had \d+ bytes .* when it was indexed, and has"):
        data.sample(0)


def test_packed_shards(tmp_path, folder, server):
    write_shard(folder / "packed.tar.gz", numbered(range(6)))
    remote = dataset(server.url("packed.tar.gz"))
    assert remote.fingerprint() == dataset(folder / "train-00000.tar").fingerprint()
    assert int(remote.sample(3)[0, 0, 0]) == 3
    with pytest.raises(ValueError, match=r"packed.tar.gz\?... of \d+ bytes unpacks to more than .*--max-unpacked-gb"):
        dataset(server.url("packed.tar.gz?again"), max_unpacked_gb=1e-6)


def test_what_is_no_shard_is_named_and_not_kept(folder, server, cache):
    (folder / "page.tar").write_text("<html>Please log in</html>" * 100)
    with pytest.raises(ValueError, match=rf"shard {server.url('page.tar')} is cut or is not a tar file"):
        dataset(server.url("page.tar"))
    assert not cached(cache)


def open_on_a_rank(cache: str, path: str, options: dict) -> str:
    os.environ["MEGASNN_CACHE"] = cache
    try:
        return dataset(path, **options).fingerprint()
    except ValueError as error:
        return str(error)


def test_ranks_of_a_node_fetch_a_shard_once_and_all_tell_what_is_wrong(ranks, folder, server, cache):
    server.faults.silent = 0.05
    found = ranks(2, open_on_a_rank, str(cache), server.url(BRACES), {})
    assert found == [dataset(folder / BRACES).fingerprint()] * 2
    assert len(server.asked) == 5
    url = server.url("missing.tar")
    for message in ranks(2, open_on_a_rank, str(cache), url, {}):
        assert message.startswith(f"cannot fetch {url}: the server answers 404")


# --- what other programs fetch


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_the_output_of_a_command(folder, cache):
    local = dataset(folder / BRACES)
    assert_same(batches(dataset(f"pipe:cat {folder}/{BRACES}")), batches(local))
    with pytest.raises(ValueError, match=r"cannot fetch pipe:cat .*/none.tar: its program ended with status 1"):
        dataset(f"pipe:cat {folder}/none.tar")
    with pytest.raises(ValueError, match=r"cannot fetch pipe:sleep 9: .*writes nothing for 0.2 s"):
        dataset("pipe:sleep 9", fetch_timeout=0.2)
    assert len(cached(cache)) == 5


@pytest.mark.parametrize(("scheme", "tool", "place"), [("s3", "aws", 4), ("gs", "gsutil", 2)])
def test_object_stores_by_the_tools_that_webdataset_takes(tmp_path, folder, monkeypatch, scheme, tool, place):
    write_index(folder)
    programs = tmp_path / "programs"
    programs.mkdir()
    program(programs, tool, f'echo "$@" >> {tmp_path}/calls\nexec cat {folder}/"$(basename "${place}")"')
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    assert_same(batches(dataset(f"{scheme}://bucket/{BRACES}")), batches(dataset(folder / BRACES)))
    calls = (tmp_path / "calls").read_text().split("\n")
    assert f"{scheme}://bucket/index.json" in calls[0] and len(calls) == 7
    write_index(folder, size=10, sha256="0" * 64)
    with pytest.raises(ValueError, match=rf"{scheme}://bucket/train-00000.tar has more than 10 bytes"):
        dataset(f"{scheme}://bucket/train-00000.tar")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=rf"cannot fetch {scheme}://bucket/a.tar: {tool} is not there; install it"):
        dataset(f"{scheme}://bucket/a.tar")


def test_urls_are_rewritten_as_webdataset_does_it(folder, monkeypatch):
    monkeypatch.setenv("GOPEN_REWRITE", f"gs://bucket={folder}")
    assert len(dataset("gs://bucket/train-00000.tar")) == PER_SHARD


def test_a_file_of_flags_runs_no_command(tmp_path, folder):
    command = f"{folder}/train-00000.tar::pipe:touch {tmp_path}/ran"
    flags = tmp_path / "config.json"
    for name in ("data_path", "valid_data_path"):
        flags.write_text(json.dumps({"data": {name: command}}))
        with pytest.raises(ConfigError, match=rf"data.{name} is .*only the command line may give one: --{name[0]}"):
            parse(run_config(Spikformer), ["--config", str(flags)])
        given = parse(run_config(Spikformer), ["--config", str(flags), f"--{name.replace('_', '-')}", command])
        assert getattr(given.data, name) == command
    # Neither braces nor another scheme before it make a command of what is none.
    for path in ("{pipe:touch,other} ran.tar", f"file:pipe:touch {tmp_path}/ran", f"file://pipe:touch {tmp_path}/ran"):
        flags.write_text(json.dumps({"data": {"data_path": path}}))
        with pytest.raises(ValueError, match="do not exist"):
            open_datasets(parse(run_config(Spikformer), ["--config", str(flags)]).data, SHAPE, CLASSES)
    assert not (tmp_path / "ran").exists()


def test_samples_to_look_at(folder, server):
    write_index(folder)
    arrays, captions = read_samples(server.url(BRACES), 2)
    assert captions == ["s000   class 0 (a)", "s001   class 1 (b)"] and arrays[1].max() == 1


def test_readers_of_fetched_shards_import_no_torch():
    code = "import sys, megasnn.data.worker, megasnn.data.reading; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
