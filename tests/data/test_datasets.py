"""Shards of one run beside each other: class numbers mean one thing, and none is used twice without a word."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from pydantic_core import to_json

from megasnn.config import DataConfig
from megasnn.data.datasets import class_difference
from megasnn.data.shards import INDEX_NAME, Index, ShardRecord, scan
from tests.data.shard_files import CLASSES, numbered, open_datasets, write_shard

SHAPE = (1, 8, 8)


def folder(path: Path, classes: list[str], numbers: range = range(6), splits: tuple[str, ...] = ("train",)) -> Path:
    """A folder with an index and a shard for each split; returns the first shard."""
    path.mkdir()
    records = []
    for split in splits:
        shard = write_shard(path / f"{split}.tar", numbered(numbers))
        records.append(ShardRecord(shard.name, split, shard.stat().st_size, [], scan(shard, "a")))
    (path / INDEX_NAME).write_bytes(to_json(asdict(Index(classes, records))))
    return path / records[0].file


@pytest.mark.parametrize("joined", [False, True])
def test_folders_that_number_classes_differently_are_refused(tmp_path, joined):
    one, other = folder(tmp_path / "one", ["cat", "dog", "owl"]), folder(tmp_path / "other", ["cat", "owl", "yak"])
    paths = {"data_path": f"{one}::{other}"} if joined else {"data_path": str(one), "valid_data_path": str(other)}
    with pytest.raises(
        ValueError, match=f"class 1 is 'dog' and 'owl' in the {INDEX_NAME} of {one} and of {other}.*--cl"
    ):
        open_datasets(DataConfig(**paths), SHAPE, CLASSES)


def test_lists_that_agree_as_far_as_they_go_are_one(tmp_path):
    one, other = folder(tmp_path / "one", ["cat", "dog"], range(2)), folder(tmp_path / "other", ["cat", "dog", "owl"])
    without = write_shard(tmp_path / "c.tar", numbered(range(3)))
    found = open_datasets(DataConfig(data_path=f"{one}::{without}", valid_data_path=str(other)), SHAPE, CLASSES)
    assert found.classes == ("cat", "dog", "owl")
    assert open_datasets(DataConfig(data_path=str(without)), SHAPE, CLASSES).classes == ()
    assert class_difference([], ["cat"]) is None and class_difference(["dog"], ["cat"]) == "class 0 is 'dog' and 'cat'"


def test_a_shard_that_is_used_twice_is_told(tmp_path):
    shard, other = (
        write_shard(tmp_path / "a.tar", numbered(range(3))),
        write_shard(tmp_path / "b.tar", numbered(range(3))),
    )
    (tmp_path / "link.tar").symlink_to(shard)
    (tmp_path / "hard.tar").hardlink_to(shard)

    def warnings(train: object, valid: object, evaluates: bool = False) -> tuple[str, ...]:
        config = DataConfig(data_path=str(train), valid_data_path=str(valid))
        return open_datasets(config, SHAPE, CLASSES, evaluates=evaluates).warnings

    assert warnings(shard, other) == () == warnings(shard, shard, evaluates=True)
    hard = tmp_path / "hard.tar"
    for valid in (shard, hard):
        (told,) = warnings(shard, valid)
        assert told == f"WARNING: {shard} of --data-path and {valid} of --valid-data-path are one shard"
    for name in ("link.tar", "hard.tar", f"../{tmp_path.name}/a.tar"):
        (told,) = warnings(f"{shard}::{tmp_path}/{name}", other)
        assert told == f"WARNING: {shard} of --data-path and {tmp_path}/{name} of --data-path are one shard"


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_folder_of_several_splits_is_taken_whole_and_told(tmp_path, evaluates):
    one = folder(tmp_path / "one", ["cat"]).parent
    both = folder(tmp_path / "both", ["cat"], range(3), splits=("train", "test")).parent
    config = DataConfig(data_path=str(one), valid_data_path=str(both))
    found = open_datasets(config, SHAPE, CLASSES, evaluates=evaluates)
    assert len(found.train) == 6 and found.valid is not None and len(found.valid) == 6
    (told,) = found.warnings
    assert told.startswith("WARNING: --valid-data-path holds the splits test, train; ")
    assert open_datasets(DataConfig(data_path=str(one)), SHAPE, CLASSES).warnings == ()
