"""From options to data sets, and the sample data."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from megasnn.cache import build_once
from megasnn.config import DataConfig
from megasnn.data.datasets import sample_format
from megasnn.preprocess.sample import shards_of_sample
from tests.data.shard_files import loader, open_datasets, write_shards


def test_the_sample_is_the_digits(cache):
    from sklearn.datasets import load_digits

    scans, labels = load_digits(return_X_y=True)
    datasets = open_datasets(DataConfig(), input_shape=(1, 8, 8), num_classes=10)
    assert (len(datasets.train), len(datasets.valid)) == (1442, 355)
    seen = set()
    for dataset in (datasets.train, datasets.valid):
        assert np.bincount(dataset.labels).min() >= len(dataset) // 10 - 4
        for index in range(0, len(dataset), 7):
            number = int(dataset.key(index).removeprefix("digit_"))
            seen.add(number)
            assert dataset.labels[index] == labels[number]
            assert np.array_equal(np.rint(dataset.sample(index).ravel() * (16 / 255)), scans[number])
    assert len(seen) == 206 + 51


def test_the_digits_are_scaled_to_the_model(cache):
    datasets = open_datasets(DataConfig(), input_shape=(3, 32, 32), num_classes=10)
    image = datasets.valid.sample(0)
    assert image.shape == (32, 32, 3)
    assert (image == image[..., :1]).all() and image.max() > 200


def test_the_sample_has_the_same_bytes_every_time(cache, monkeypatch):
    first = [shard.read_bytes() for shard in shards_of_sample(events=False)]
    monkeypatch.setenv("MEGASNN_CACHE", str(cache / "again"))
    assert [shard.read_bytes() for shard in shards_of_sample(events=False)] == first


def _open_in_a_process(barrier, folder, results):
    os.environ["MEGASNN_CACHE"] = folder
    import sklearn.datasets  # noqa: F401  (so that all reach the cache together)
    import webdataset  # noqa: F401

    barrier.wait()
    datasets = open_datasets(DataConfig(), input_shape=(1, 8, 8), num_classes=10)
    results.put((datasets.train.fingerprint(), datasets.valid.fingerprint()))


def test_ranks_that_start_together_make_the_sample_once(cache):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.SimpleQueue()
    ranks = [context.Process(target=_open_in_a_process, args=(barrier, str(cache), results)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    found = {results.get() for _ in ranks}
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    datasets = open_datasets(DataConfig(), input_shape=(1, 8, 8), num_classes=10)
    assert found == {(datasets.train.fingerprint(), datasets.valid.fingerprint())}
    files = [path.name for path in cache.rglob("*") if path.is_file()]
    assert len([name for name in files if not name.startswith(".")]) == 4
    assert all(name.endswith(".lock") for name in files if name.startswith("."))


def test_a_file_that_cannot_be_finished_leaves_nothing(cache):
    def full_disk(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match=r"thing\.tar: .*No space left.*MEGASNN_CACHE"):
        build_once(cache / "thing.tar", full_disk)
    assert {path.name for path in cache.iterdir()} == {".thing.tar.lock"}


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ((1, 8, 6), "images are made square, and the model takes 8 x 6"),
        ((3, 8), r"shards hold images and recordings, and the model takes samples of the shape \[3, 8\]"),
        ((2, 3, 8, 8), "event frames have 2 channels"),
    ],
)
def test_a_model_that_takes_what_no_shard_holds(shape, problem):
    with pytest.raises(ValueError, match=problem):
        sample_format(DataConfig(), shape)


def test_training_and_validation_paths(tmp_path):
    write_shards(tmp_path, samples=6, per_shard=3)
    both = DataConfig(data_path=f"{tmp_path}/train-{{00000..00001}}.tar", valid_data_path=f"{tmp_path}/train-00001.tar")
    datasets = open_datasets(both, input_shape=(1, 8, 8), num_classes=3)
    assert (len(datasets.train), len(datasets.valid)) == (6, 3)
    alone = open_datasets(DataConfig(data_path=f"{tmp_path}/train-00000.tar"), (1, 8, 8), 3)
    assert alone.valid is None
    with pytest.raises(ValueError, match="--valid-data-path"):
        open_datasets(DataConfig(valid_data_path=f"{tmp_path}/none.tar"), (1, 8, 8), 3)


REAL = os.environ.get("MEGASNN_DATA")


@pytest.mark.skipif(not REAL, reason="MEGASNN_DATA does not name the folder of real data")
def test_cifar10():
    config = DataConfig(
        data_path=f"{REAL}/cifar10_jpeg/cifar10-train-{{00000..00009}}.tar.gz",
        valid_data_path=f"{REAL}/cifar10_jpeg/cifar10-test-*.tar.gz",
        augment="cifar",
    )
    datasets = open_datasets(config, input_shape=(3, 32, 32), num_classes=10)
    assert np.bincount(datasets.train.labels).tolist() == [5000] * 10
    assert np.bincount(datasets.valid.labels).tolist() == [1000] * 10
    classes = "airplane automobile bird cat deer dog frog horse ship truck".split()
    for index in range(0, 50_000, 499):
        assert datasets.train.key(index).split("_")[1] == classes[datasets.train.labels[index]]
    sizes = {"global_batch_size": 500, "micro_batch_size": 250}
    batches = loader(datasets.valid, training=False, num_workers=1, **sizes).batches(limit=4)
    images = np.concatenate([part.images.numpy() for batch in batches for part in batch.micro_batches])
    assert np.abs(images.mean(axis=(0, 2, 3))).max() < 0.1
    assert np.abs(images.std(axis=(0, 2, 3)) - 1).max() < 0.1
