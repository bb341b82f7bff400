from __future__ import annotations

import pytest

from megasnn.data.paths import expand_shards


@pytest.fixture
def folder(tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for name in ("train-00000.tar", "train-00001.tar", "train-00002.tar.gz"):
        (shards / name).write_bytes(b"x")
    return shards


def names(paths):
    return [path.name for path in paths]


def test_braces_keep_their_order_and_their_zeros(folder):
    assert names(expand_shards(f"{folder}/train-{{00001..00000}}.tar")) == [
        "train-00001.tar",
        "train-00000.tar",
    ]


def test_a_glob_and_a_folder_are_sorted(folder):
    everything = ["train-00000.tar", "train-00001.tar", "train-00002.tar.gz"]
    assert names(expand_shards(f"{folder}/train-*")) == everything
    (folder / "notes.txt").write_text("not a shard")
    assert names(expand_shards(str(folder))) == everything


def test_several_paths_are_joined_as_in_webdataset(folder):
    joined = expand_shards(f"{folder}/train-00001.tar::{folder}/train-00000.tar")
    assert names(joined) == ["train-00001.tar", "train-00000.tar"]


def test_urls_stay_text_and_file_urls_are_paths(folder):
    urls = expand_shards("https://host/a-{0..1}.tar?x=1::pipe:cat {1..0}.tar")
    assert urls == ["https://host/a-0.tar?x=1", "https://host/a-1.tar?x=1", "pipe:cat 1.tar", "pipe:cat 0.tar"]
    assert expand_shards("http://[::1]:80/a.tar::http://[::2]/b.tar") == ["http://[::1]:80/a.tar", "http://[::2]/b.tar"]
    for scheme in ("file:", "file://"):
        assert expand_shards(f"{scheme}{folder}/train-0000{{0..1}}.tar") == expand_shards(f"{folder}/*[01].tar")


def test_a_missing_shard_is_named_with_its_flag(folder):
    with pytest.raises(ValueError, match=r"1 of 3 shards of --valid-data-path .*train-00002\.tar$"):
        expand_shards(f"{folder}/train-{{00000..00002}}.tar", "--valid-data-path")


def test_a_folder_that_mixes_splits_is_refused(folder):
    (folder / "test-00000.tar").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"mixes shards of several splits \(test, train\)"):
        expand_shards(str(folder))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{folder}/nothing-*.tar", "matches no file"),
        ("{folder}/train-{{00000..00001.tar", "unbalanced"),
        ("{folder}/train-00000.tar::{folder}/train-00000.tar", "more than once"),
        ("ftp2://host/train-00000.tar", "no opener for ftp2:"),
        ("http://host/{{0..1}}.tar::http://host/1.tar", "more than once: http://host/1.tar"),
        ("http://host/{{0..1.tar", "unbalanced"),
        ("http://me:secret@host/1.tar::http://me:secret@host/1.tar", "more than once: http://host/1.tar$"),
        ("http://me:secret@[bad/1.tar", r"^\[bad/1.tar is no address: .*; correct it"),
        ("https:///1.tar", "https:///1.tar is no address: it names no host"),
        ("http://host:99999/1.tar", "is no address: Port out of range"),
        ("{folder}/notes.txt", "is not a shard"),
        ("{folder}/empty", "holds no shard"),
    ],
)
def test_what_cannot_be_meant_is_refused(folder, path, message):
    (folder / "notes.txt").write_text("x")
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        expand_shards(path.format(folder=folder))
