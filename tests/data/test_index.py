"""An index and its shard: where one was changed after the other, the shard is read anew, or refused."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from pydantic_core import to_json

from megasnn.data.shards import INDEX_NAME, Index, ShardRecord, open_shard, read_index, scan
from tests.data.shard_files import after, image_file, numbered, open_all, write_shard
from tests.data.test_shards import values


def write_folder(folder: Path, samples: dict[str, dict[str, bytes]]) -> Path:
    """A shard `a.tar` and the index that lists it, written after it; returns the shard."""
    folder.mkdir(exist_ok=True)
    path = write_shard(folder / "a.tar", samples)
    index = Index([], [ShardRecord(path.name, "train", path.stat().st_size, [], scan(path, "a"))])
    after(path, lambda: (folder / INDEX_NAME).write_bytes(to_json(asdict(index))))
    return path


def rewrite(path: Path, samples: dict[str, dict[str, bytes]]) -> None:
    """Another shard of the same size and time in the place of one."""
    status = path.stat()
    after(path.with_name(INDEX_NAME), lambda: write_shard(path, samples))
    assert path.stat().st_size == status.st_size, "tar rounds to 10 kB"
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def other_classes() -> dict[str, dict[str, bytes]]:
    samples = numbered(range(4))
    for files in samples.values():
        files["cls"] = b"2"
    return samples


def other_order() -> dict[str, dict[str, bytes]]:
    return dict(reversed(numbered(range(4)).items()))


def other_pixels() -> dict[str, dict[str, bytes]]:
    noise = np.random.default_rng(0).integers(0, 256, (8, 8)).astype(np.uint8)
    return numbered(range(4)) | {"s001": {"png": image_file(noise), "cls": b"1"}}


@pytest.mark.parametrize("change", [other_classes, other_order, other_pixels])
def test_a_shard_that_was_changed_behind_its_index_is_refused(tmp_path, change):
    path = write_folder(tmp_path, numbered(range(4)))
    assert values(open_all([path])) == [0, 1, 2, 3]
    rewrite(path, change())
    with pytest.raises(ValueError, match=f"shard {path} was changed after {INDEX_NAME}.*remove {INDEX_NAME}"):
        open_shard(path)
    (tmp_path / INDEX_NAME).unlink()
    assert open_all([path]).labels.tolist() == [int(files["cls"]) for files in change().values()]


def test_a_copy_of_a_folder_is_read_anew_and_agrees(tmp_path):
    """cp writes the index before or after shards, as its name comes."""
    path = write_folder(tmp_path / "made", numbered(range(4)))
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / path.name
    shutil.copy(path.with_name(INDEX_NAME), copy.with_name(INDEX_NAME))
    after(copy.with_name(INDEX_NAME), lambda: shutil.copy(path, copy))
    assert values(open_all([copy])) == [0, 1, 2, 3]
    record = json.loads(copy.with_name(INDEX_NAME).read_text())
    for name in ("starts", "ends"):  # as folders of before have it
        del record["shards"][0]["members"][name]
    copy.with_name(INDEX_NAME).write_text(json.dumps(record))
    after(copy.with_name(INDEX_NAME), lambda: copy.write_bytes(path.read_bytes()))
    assert values(open_all([copy])) == [0, 1, 2, 3]


def test_a_cached_index_is_of_the_content_not_of_size_and_time(tmp_path):
    path = write_folder(tmp_path, numbered(range(4)))
    (tmp_path / INDEX_NAME).unlink()
    assert open_all([path]).labels.tolist() == [0, 1, 2, 0]
    (tmp_path / INDEX_NAME).touch()
    rewrite(path, other_classes())
    (tmp_path / INDEX_NAME).unlink()
    assert open_all([path]).labels.tolist() == [2, 2, 2, 2]


def test_another_shard_of_the_same_size_and_time_in_mid_run_is_noticed(tmp_path):
    path = write_folder(tmp_path, numbered(range(4)))
    dataset, status = open_all([path]), path.stat()
    other = write_shard(tmp_path / "b.tar", other_order())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(other, path)
    with pytest.raises(ValueError, match=f"'s003' of shard {path} cannot be read.*changed while in use"):
        dataset.sample(3)


@pytest.mark.parametrize("name", ["keys", "labels", "offsets", "sizes", "starts", "ends"])
def test_lists_of_different_lengths_are_refused(tmp_path, name):
    path = write_folder(tmp_path, numbered(range(4)))
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    index["shards"][0]["members"][name].pop()
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{INDEX_NAME}: .*members.*different lengths"):
        open_shard(path)


@pytest.mark.parametrize("name", ["offsets", "sizes", "ends"])
def test_a_sample_behind_the_end_of_its_shard_is_refused(tmp_path, name):
    path = write_folder(tmp_path, numbered(range(4)))
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    index["shards"][0]["members"][name][2] = path.stat().st_size + 1
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{INDEX_NAME}: .*ends behind the {path.stat().st_size} bytes of a.tar"):
        open_shard(path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_an_index_that_is_no_file_is_refused(tmp_path, kind):
    path = write_shard(tmp_path / "a.tar", numbered(range(2)))
    if kind == "pipe":
        os.mkfifo(tmp_path / INDEX_NAME)
    elif kind == "folder":
        (tmp_path / INDEX_NAME).mkdir()
    else:
        (tmp_path / INDEX_NAME).symlink_to("/dev/zero")
    for read in (lambda: open_shard(path), lambda: read_index(tmp_path)):
        with pytest.raises(OSError, match=f"should be a file: .*{INDEX_NAME}"):
            read()
