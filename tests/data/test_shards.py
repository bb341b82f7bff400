"""Shards: found by their paths, indexed once, and refused by name where they are cut, changed, incomplete or no tar."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile

import numpy as np
import pytest

from megasnn.common.files import NAME_BYTES
from megasnn.data import shards as shards_
from megasnn.data.remote import expand_shards
from megasnn.data.shards import open_shard, scan
from tests.data.shard_files import after, image_file, numbered, open_all, write_shard, write_shards


def values(dataset) -> list[int]:
    return [int(np.unique(dataset.sample(index)).item()) for index in range(len(dataset))]


def test_samples_are_found_across_many_shards(tmp_path):
    dataset = open_all(write_shards(tmp_path, samples=40, per_shard=1))
    before = len(os.listdir("/proc/self/fd"))
    assert [dataset.key(index) for index in range(40)] == [f"s{number:03d}" for number in range(40)]
    assert values(dataset) == list(range(40)) and dataset.labels.tolist()[:7] == [0, 1, 2, 0, 1, 2, 0]
    assert len(os.listdir("/proc/self/fd")) - before <= 16
    whole, packed = write_shard(tmp_path / "b.tar", numbered(range(40))), tmp_path / "b.tar.gz"
    packed.write_bytes(gzip.compress(whole.read_bytes()))
    for other in (open_all([whole]), open_all([packed])):
        assert values(other) == list(range(40)) and other.fingerprint() == dataset.fingerprint()


def test_files_of_a_sample_need_not_be_neighbours_and_folders_are_part_of_the_key(tmp_path):
    path, data = tmp_path / "a.tar", tmp_path / "data"
    with tarfile.open(path, "w") as archive:
        for suffix in ("png", "cls", "json"):
            for number in (4, 5):
                data.write_bytes(numbered(range(9))[f"s{number:03d}"].get(suffix, b"{}"))
                archive.add(data, f"images/s{number}.{suffix.upper()}")
    dataset = open_all([path])
    assert [dataset.key(index) for index in range(2)] == ["images/s4", "images/s5"] and values(dataset) == [4, 5]


def test_a_shard_is_scanned_once_and_again_when_it_changes(tmp_path, monkeypatch):
    scans = []
    monkeypatch.setattr(shards_, "scan", lambda *args: scans.append(args) or scan(*args))
    path = write_shard(tmp_path / "a.tar", numbered(range(2)))
    assert len(open_shard(path).members.keys) == len(open_shard(path).members.keys) == 2 and len(scans) == 1
    write_shard(path, numbered(range(30)))
    assert len(open_shard(path).members.keys) == 30 and len(scans) == 2


def test_offsets_in_index_json_spare_the_scan_and_are_checked(tmp_path, monkeypatch):
    path = write_shard(tmp_path / "a.tar", numbered(range(3)))
    members = {name: list(value) for name, value in vars(scan(path, "a")).items()}

    def write(**changes: object) -> None:
        record = {"file": "a.tar", "split": "train", "size": path.stat().st_size, "broken": []}
        record["members"] = members | changes
        content = {"version": 1, "classes": [], "shards": [record]}
        (tmp_path / "index.json").write_text(json.dumps(content))

    after(path, write)
    monkeypatch.setattr(shards_, "scan", lambda *_: pytest.fail("it is scanned"))
    assert values(open_all([path])) == [0, 1, 2]
    for changes, named in (
        ({"labels": ["cat"] * 3}, "index.json: .*labels"),
        ({"offsets": [-1] * 3}, "index.json: .*offsets"),
    ):
        write(**changes)
        with pytest.raises(ValueError, match=named):
            open_shard(path)
    write()
    with open(path, "ab") as file:
        file.write(bytes(512))
    with pytest.raises(ValueError, match=f"{path}.*index.json"):
        open_shard(path)


def test_every_cut_of_a_tar_is_noticed_and_leaves_nothing(tmp_path, cache):
    whole = write_shard(tmp_path / "whole.tar", numbered(range(2))).read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512  # of the last file, rounded up to blocks
    damaged = {f"{cut}.tar": whole[:cut] for cut in (*range(0, end + 1, 512), *range(100, end, 700), end + 100)}
    packed = gzip.compress(whole)
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 0xFF
    damaged |= {f"{cut}.tar.gz": packed[:cut] for cut in (5, len(packed) // 2, -9, -4)} | {"f.tar.gz": bytes(flipped)}
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=str(tmp_path / name)):
            open_shard(tmp_path / name)
    assert not [found for found in cache.glob("*/.*") if not found.name.endswith(".lock")]


@pytest.mark.parametrize("damage", ["cut", "overwritten", "replaced", "removed"])
def test_a_shard_that_changes_while_in_use_is_named_with_the_member(tmp_path, damage):
    path = write_shards(tmp_path, samples=4, per_shard=4)[0]
    dataset = open_all([path])
    if damage in ("cut", "overwritten"):
        dataset.sample(0)  # it is open by now
    if damage == "cut":
        os.truncate(path, 600)
    elif damage == "overwritten":
        path.write_bytes(bytes(path.stat().st_size))
    else:
        path.unlink()
    if damage == "replaced":
        write_shard(path, numbered(range(4, 8)))
    with pytest.raises(ValueError, match=f"'s003' of shard {path}"):
        dataset.sample(3)


CHANGES = {
    "s001.cls": lambda files: files.pop("cls"),
    "'s001' of shard .*png": lambda files: files.pop("png"),
    "'s001' of shard .*jpg, png": lambda files: files.update(jpg=b"1"),
    "s001.cls.*b'cat'": lambda files: files.update(cls=b"cat"),
    "s001.cls.*b''": lambda files: files.update(cls=b""),
    "s001.cls.*b'111": lambda files: files.update(cls=b"1" * 1000),
    "s001.cls.*b'1_0'": lambda files: files.update(cls=b"1_0"),
    "s001.cls.*b'1  .* class number alone": lambda files: files.update(cls=b"1" + b" " * 40 + b"cat"),
    "s001.cls.*b'2147483648'": lambda files: files.update(cls=b"2147483648"),
}


def test_an_incomplete_sample_is_named(tmp_path):
    for named, change in CHANGES.items():
        samples = numbered(range(3))
        change(samples["s001"])
        with pytest.raises(ValueError, match=named):
            open_shard(write_shard(tmp_path / "a.tar", samples))


def test_a_file_that_is_no_sound_shard_is_named(tmp_path):
    sound = write_shard(tmp_path / "a.tar", numbered(range(2))).read_bytes()
    with tarfile.open(tmp_path / "a.tar", "a") as archive:
        archive.addfile(tarfile.TarInfo("s001.png"))
    twice, empty = (tmp_path / "a.tar").read_bytes(), write_shard(tmp_path / "b.tar", {}).read_bytes()
    wrong_name = sound.replace(b"s001.png", b"s\xe901.png")
    for number, content in enumerate((empty, b"something else" * 100, sound * 2, twice, wrong_name)):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=str(path)):
            open_shard(path)


@pytest.mark.parametrize("size", [4096, 1 << 20])  # within the tar and beyond its end
@pytest.mark.parametrize("kind", ["old GNU", "PAX 0.1"])
def test_a_sparse_member_is_refused_by_name(tmp_path, kind, size):
    """The bytes at its place in the tar are not those of the file: holes are left out."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in (("a.png", bytes(512)), ("a.cls", b"0")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if name == "a.png" and kind == "PAX 0.1":
                member.pax_headers = {"GNU.sparse.map": "0,512", "GNU.sparse.size": str(size), "GNU.sparse.name": name}
            archive.addfile(member, io.BytesIO(content))
    if kind == "old GNU":
        content = bytearray(path.read_bytes())
        content[156] = ord("S")  # type of the first member
        content[386:410] = b"00000000000\0" + b"00000001000\0"  # a piece of 512 bytes at 0
        content[483:495] = b"%011o\0" % size  # of a file of this size
        content[148:156] = b" " * 8
        content[148:156] = b"%06o\0 " % sum(content[:512])
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"shard {path}: 'a.png' is stored as a sparse file.*--sparse"):
        open_shard(path)


def test_a_name_is_bounded_since_all_take_the_space_of_the_longest(tmp_path):
    longest = "n" * NAME_BYTES
    assert open_shard(write_shard(tmp_path / "a.tar", {longest: numbered(range(1))["s000"]})).members.keys == [longest]
    with pytest.raises(ValueError, match=f"shard {tmp_path}/b.tar: the name 'nnnn.*more than {NAME_BYTES} bytes"):
        open_shard(write_shard(tmp_path / "b.tar", {longest + "n": numbered(range(1))["s000"]}))


def test_labels_out_of_range_are_named_and_the_fingerprint_tells_data_sets_apart(tmp_path):
    prints = {open_all(write_shards(tmp_path, samples=6, per_shard=3)).fingerprint()}
    assert open_all(write_shards(tmp_path, samples=6, per_shard=6)[:1]).fingerprint() in prints
    for name, change in (("label", b"0"), ("large", b"3"), ("negative", b"-1"), ("bytes", None)):
        samples = numbered(range(6))
        files = {"cls": change} if change else {"png": image_file(np.zeros((9, 9), np.uint8))}
        samples["s002"] |= files
        path = write_shard(tmp_path / f"{name}.tar", samples)
        if name in ("large", "negative"):
            named = rf"{change.decode()} of sample 's002' of shard {path}.*--num-classes \(now 3\)"
            with pytest.raises(ValueError, match=named):
                open_all([path])
        else:
            prints.add(open_all([path]).fingerprint())
    for numbers in (range(5), range(1, 7)):
        prints.add(open_all([write_shard(tmp_path / "a.tar", numbered(numbers))]).fingerprint())
    assert len(prints) == 5


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shards").mkdir()
    for name in ("train-00000.tar", "train-00001.tar", "train-00002.tgz"):
        (tmp_path / "shards" / name).write_bytes(b"x")
    return tmp_path / "shards"


def names(path: str) -> list[str]:
    return [shard if isinstance(shard, str) else shard.name for shard in expand_shards(path)]


def test_braces_keep_their_order_and_globs_are_sorted(folder):
    assert names(f"{folder}/train-{{00001..00000}}.tar") == ["train-00001.tar", "train-00000.tar"]
    everything = ["train-00000.tar", "train-00001.tar", "train-00002.tgz"]
    assert names(f"{folder}/train-*") == everything
    assert names(f"{folder}/train-00001.tar::file://{folder}/train-00000.tar") == everything[1::-1]
    urls = ["https://host/a-0.tar?x=1", "https://host/a-1.tar?x=1", "pipe:cat 1.tar", "pipe:cat 0.tar"]
    assert names("https://host/a-{0..1}.tar?x=1::pipe:cat {1..0}.tar") == urls


def test_a_folder_stands_for_its_tars_in_order(folder):
    (folder / "._train-00000.tar").touch()
    (folder / "index.json").touch()
    assert names(str(folder)) == names(f"file:{folder}/") == ["train-00000.tar", "train-00001.tar"]
    assert names(f"{folder}::{folder}/train-00002.tgz")[2:] == ["train-00002.tgz"]


@pytest.mark.parametrize("path", ["{folder}", "{folder}/train-9.tar", "{folder}/train-[9].tar"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_is_no_shard(folder, path, kind):
    other = folder / "train-9.tar"
    if kind == "pipe":
        os.mkfifo(other)
    else:
        other.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=f"--data-path: {other} is no regular file"):
        expand_shards(path.format(folder=folder))


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("{folder}/train-{{00000..00002}}.tar", "--data-path.*train-00002.tar"),
        ("{folder}/nothing-*.tar", "nothing"),
        ("{folder}/train-{{00000..00001.tar", "unbalanced"),
        ("{folder}/train-00000.tar::{folder}/train-00000.tar", "train-00000.tar"),
        ("http://me:secret@host/1.tar::http://me:secret@host/1.tar", "--data-path http://host/1.tar"),
        ("{folder}/empty", "the folder .*/empty holds no shards.*tools/preprocess_data.py"),
        ("{folder}/e*", "matches the folder .*/empty"),
        ("{folder}/none.tar", "none.tar does not exist"),
        ("{folder}/${{NOT_SET}}/1.tar", r"--data-path .*\$\{NOT_SET\}.*WDS_NOT_SET is not set"),
        ("http://me:secret@host/{{0..9999999}}.tar", "--data-path 'http://host/.*more than 100,000 shards"),
        ("a-{{0..999999999999}}.tar", "more than 100,000 shards"),
        ("a-{{9999999..-9999999..2}}.tar", "more than 100,000 shards"),
        ("file:pipe:touch x", "becomes the command 'pipe:touch x'"),
        ("file://file:pipe:touch x", "becomes the command"),
        ("a.tar::{{p,p}}ipe:touch x", "becomes the command"),
        ("${{COMMAND}}touch x", "becomes the command"),
    ],
)
def test_paths_that_cannot_be_meant_are_refused(folder, path, named, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WDS_COMMAND", "pipe:")
    (folder / "a.tar").touch()
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=named):
        expand_shards(path.format(folder=folder))
