"""Runs are repeated, killed, run out of disk, or meet something else in their folder."""

from __future__ import annotations

import hashlib
import os
import resource
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from megasnn.data.preprocess.sources import Item, Listing
from megasnn.data.preprocess.writing import preprocess
from megasnn.data.shards import Index, read_index
from tests.forking import forking


def encode(item: Item) -> dict[str, bytes]:
    """Stands for the reading of an image; the source's name says what is wrong with it."""
    if item.source.name == "bad":
        raise ValueError(f"{item.source} of {item.key} is broken")
    if item.source.name == "dying":
        os._exit(9)
    if item.source.name == "slow":
        time.sleep(0.05)
    return {"png": item.key.encode() * 300}


def make(output: Path, wrong: tuple[int, ...] = (), how: str = "bad", **options) -> Index:
    items = [Item(f"s{n}", n % 3, Path(how if n in wrong else str(n))) for n in range(23)]
    return preprocess(Listing({"train": items, "test": items[:5]}, ["a", "b", "c"]), encode, output, 4, **options)


def bytes_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_index_tells_what_is_there(tmp_path) -> None:
    index = make(tmp_path / "out")
    names = [f"train-{n:05d}.tar" for n in range(6)] + [f"test-{n:05d}.tar" for n in range(2)]
    assert sorted(bytes_of(tmp_path / "out")) == sorted([*names, "index.json"])
    assert [len(shard.members.keys) for shard in index.shards] == [4, 4, 4, 4, 4, 3, 4, 1]
    assert index == read_index(tmp_path / "out")
    keys = []
    for shard in index.shards:
        data = (tmp_path / "out" / shard.file).read_bytes()
        assert len(data) == shard.size
        places = zip(shard.members.keys, shard.members.offsets, shard.members.sizes, strict=True)
        assert all(data[start : start + size] == key.encode() * 300 for key, start, size in places)
        keys += shard.members.keys if shard.split == "train" else []
    assert keys == [f"s{n}" for n in range(23)]


def test_the_same_shards_for_any_number_of_processes(tmp_path) -> None:
    for name, workers in (("one", 1), ("three", 3)):
        make(tmp_path / name, workers=workers)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "three")
    assert sorted(os.listdir(tmp_path)) == ["one", "three"]


def test_a_folder_that_is_there_is_refused(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    make(tmp_path / "empty")
    before = bytes_of(tmp_path / "empty")
    (tmp_path / "killed.partial").mkdir()
    (tmp_path / "file").write_text("mine")
    for output, named in (("empty", "--output"), ("file", "--output"), ("killed", "killed.partial")):
        with pytest.raises(ValueError, match=named):
            make(tmp_path / output)
    assert bytes_of(tmp_path / "empty") == before and (tmp_path / "file").read_text() == "mine"


def test_a_broken_sample_ends_the_run_or_is_left_out_and_listed_and_a_dead_worker_ends_it(tmp_path) -> None:
    for wrong, how, error in (((9,), "bad", ValueError), ((7,), "dying", BrokenProcessPool)):
        with pytest.raises(error):
            make(tmp_path / "out", wrong, how, workers=2)
        assert not os.listdir(tmp_path)
    index = make(tmp_path / "out", (9, 14), skip_broken=True)
    assert sum(len(shard.members.keys) for shard in index.of_split("train")) == 21
    assert len([reason for shard in index.shards for reason in shard.broken]) == 2
    with pytest.raises(ValueError, match="4 samples"):
        make(tmp_path / "all", tuple(range(23)), skip_broken=True)


def slowly(output: Path) -> None:
    """In a process that leads a group, of itself and of its workers."""
    os.setsid()
    make(output, tuple(range(23)), "slow", workers=2)


def test_a_run_that_is_killed_leaves_nothing_that_looks_complete(tmp_path) -> None:
    run = forking().Process(target=slowly, args=(tmp_path / "out",))
    run.start()
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out.partial").glob("*.tar")):
        assert run.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)
    run.kill()  # nothing can be tidied up, and the workers lose their parent
    run.join(60)
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial").exists()
    with pytest.raises(ProcessLookupError):  # the workers have ended
        while time.monotonic() < deadline:
            os.killpg(run.pid, 0)
            time.sleep(0.05)


def test_a_disk_that_is_full_is_an_error_that_names_the_shard(tmp_path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limit[1]))
        with pytest.raises(ValueError, match=r"train-0000\d\.tar.*File too large"):
            make(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not os.listdir(tmp_path)
