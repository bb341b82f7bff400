"""CIFAR-10's files, folders of images and the digits."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megasnn.commands import preprocess_data
from megasnn.data.images import ImageFormat
from megasnn.data.index import read_index
from megasnn.data.shards import open_shard
from megasnn.preprocess.image_sets import CIFAR10_CLASSES
from tests.data import hostile

noise = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path / "cache"))


def preprocess(dataset: str, folder: Path, *flags: object) -> int:
    argv = [dataset, "--input", folder / "in", "--output", folder / "out", "--workers", 1, *flags]
    return preprocess_data.main([str(argument) for argument in argv])


def samples(shard: Path) -> dict[str, tuple[int, bytes]]:
    opened, data = open_shard(shard), shard.read_bytes()
    columns = zip(
        opened.keys.tolist(), opened.labels.tolist(), opened.offsets.tolist(), opened.sizes.tolist(), strict=True
    )
    return {key.decode(): (label, data[start : start + size]) for key, label, start, size in columns}


def cifar10_files(folder: Path, each: int = 12) -> dict[str, tuple[np.ndarray, list[int]]]:
    written = {}
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        pixels = noise.integers(0, 256, (each, 3072)).astype(np.uint8)
        labels = noise.integers(0, 10, each).tolist()
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels}, protocol=2))
        written[name] = (pixels, labels)
    return written


def image(folder: Path, name: str, size: tuple[int, int] = (8, 8), kind: str = "PNG") -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    Image.fromarray(noise.integers(0, 256, (*size, 3)).astype(np.uint8)).save(buffer, kind)
    (folder / name).write_bytes(buffer.getvalue())
    return buffer.getvalue()


def test_cifar10_as_downloaded(tmp_path) -> None:
    written = cifar10_files(tmp_path / "in" / "cifar-10-batches-py")
    assert preprocess("cifar10", tmp_path) == 0
    train = samples(tmp_path / "out" / "train-00000.tar")
    assert len(train) == 60 and len(samples(tmp_path / "out" / "test-00000.tar")) == 12
    for number in range(1, 6):
        pixels, labels = written[f"data_batch_{number}"]
        for row in range(12):
            label, png = train[f"train_{CIFAR10_CLASSES[labels[row]]}_{number}_{row:04d}"]
            assert label == labels[row]
            decoded = ImageFormat(32, 3).decode(png)
            assert np.array_equal(decoded.transpose(2, 0, 1).ravel(), pixels[row])


@pytest.mark.parametrize(
    "content",
    [b"", b"junk", pickle.dumps({b"data": np.zeros((2, 5))}), pickle.dumps({b"labels": [1]}), pickle.dumps(Path("x"))],
)
def test_a_cifar10_file_that_is_none(tmp_path, capsys, content) -> None:
    cifar10_files(tmp_path / "in")
    (tmp_path / "in" / "data_batch_3").write_bytes(content)
    assert preprocess("cifar10", tmp_path) == 1
    assert "data_batch_3 is missing, cut or none of CIFAR-10's" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_pickle_cannot_run_anything(tmp_path, capsys) -> None:
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "touched",))

    cifar10_files(tmp_path / "in")
    (tmp_path / "in" / "data_batch_1").write_bytes(pickle.dumps(Evil()))
    assert preprocess("cifar10", tmp_path) == 1
    assert not (tmp_path / "touched").exists()


def test_cifar10_in_class_folders(tmp_path) -> None:
    for split in ("train", "test"):
        for name in CIFAR10_CLASSES:
            image(tmp_path / "in" / split / name, "0001.png")
    assert preprocess("cifar10", tmp_path) == 0
    train = samples(tmp_path / "out" / "train-00000.tar")
    assert {key: label for key, (label, _) in train.items()} == {
        f"{name}_0001": label for label, name in enumerate(CIFAR10_CLASSES)
    }


def test_an_image_folder_is_taken_over_byte_by_byte(tmp_path) -> None:
    root, files = tmp_path / "in", {}
    for split in ("train", "val"):
        for name in ("n01", "n02"):
            for number in range(3):
                files[split, f"{name}_{number}"] = image(root / split / name, f"{name}_{number}.JPEG", kind="JPEG")
    assert preprocess("image-folder", tmp_path) == 0
    for split in ("train", "val"):
        found = samples(tmp_path / "out" / f"{split}-00000.tar")
        assert len(found) == 6
        assert all(files[split, key] == data and label == int(key[2]) - 1 for key, (label, data) in found.items())


def test_images_are_scaled_by_the_shorter_side_and_small_ones_left(tmp_path) -> None:
    image(tmp_path / "in" / "a", "large.jpg", (60, 40), "JPEG")
    image(tmp_path / "in" / "a", "large.png", (40, 60))
    (tmp_path / "in" / "a" / "large.png").rename(tmp_path / "in" / "a" / "wide.png")
    small = image(tmp_path / "in" / "a", "small.png", (10, 50))
    assert preprocess("image-folder", tmp_path, "--size", 20) == 0
    found = samples(tmp_path / "out" / "train-00000.tar")
    sizes = {key: Image.open(io.BytesIO(data)).size for key, (_, data) in found.items()}
    assert sizes == {"a_large": (20, 30), "a_wide": (30, 20), "a_small": (50, 10)}
    assert found["a_small"][1] == small


def test_damaged_images_are_found_unless_told_otherwise(tmp_path, capsys) -> None:
    image(tmp_path / "in" / "a", "good.png")
    (tmp_path / "in" / "a" / "bad.png").write_bytes(b"no image")
    assert preprocess("image-folder", tmp_path) == 1
    assert "bad.png cannot be decoded" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.tar*"))
    assert preprocess("image-folder", tmp_path, "--no-check-images") == 0
    assert len(samples(tmp_path / "out" / "train-00000.tar")) == 2


@pytest.mark.parametrize("flags", [(), ("--size", "4")])
def test_images_that_training_would_not_take_are_found_too(tmp_path, capsys, flags) -> None:
    """Sixteen bits would be cut off at white when scaled; a GIF is none, whatever it is called."""
    for number, (pixels, kind) in enumerate(((np.full((8, 8), 999, np.uint16), "PNG"), (np.eye(8) > 0, "GIF"))):
        folder = tmp_path / str(number)
        (folder / "in" / "a").mkdir(parents=True)
        Image.fromarray(pixels).save(folder / "in" / "a" / "odd.png", kind)
        assert preprocess("image-folder", folder, *flags) == 1
        assert "odd.png cannot be decoded" in capsys.readouterr().err


def test_numbered_files_in_numbered_classes(tmp_path) -> None:
    for name in ("1", "11"):
        for file in ("1", "11", f"{name}_7"):
            image(tmp_path / "in" / name, f"{file}.png")
    assert preprocess("image-folder", tmp_path) == 0
    labels = {key: label for key, (label, _) in samples(tmp_path / "out" / "train-00000.tar").items()}
    assert labels == {"1_1": 0, "1_11": 0, "1_7": 0, "11_1": 1, "11_11": 1, "11_7": 1}


def test_names_that_would_collide(tmp_path, capsys) -> None:
    image(tmp_path / "in" / "a", "x.1.png")
    image(tmp_path / "in" / "a", "x_1.png")
    assert preprocess("image-folder", tmp_path) == 1
    assert "called 'a_x_1'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_class_that_only_one_split_has(tmp_path, capsys) -> None:
    for split, name in (("train", "a"), ("val", "a"), ("val", "b")):
        image(tmp_path / "in" / split / name, "1.png")
    assert preprocess("image-folder", tmp_path) == 1
    assert "val has folders that" in capsys.readouterr().err


def test_the_digits(tmp_path) -> None:
    assert preprocess_data.main(["digits", "--output", str(tmp_path / "out"), "--workers", "1"]) == 0
    counts = [len(samples(path)) for path in sorted((tmp_path / "out").glob("*.tar"))]
    assert counts == [500, 500, 442, 355]


def test_images_that_are_too_large_and_pipes_are_counted_as_broken(tmp_path, capsys) -> None:
    folder = tmp_path / "in" / "cat"
    image(folder, "1.png", (600, 600))
    (folder / "2.png").write_bytes(hostile.png(13_000, 13_000))
    os.mkfifo(folder / "3.png")
    assert preprocess("image-folder", tmp_path) == 1
    assert "--skip-broken" in capsys.readouterr().err
    assert preprocess("image-folder", tmp_path, "--skip-broken") == 0
    index = read_index(tmp_path / "out")
    assert index is not None
    large, pipe = sorted(reason for shard in index.shards for reason in shard.broken)
    assert f"{folder / '2.png'} cannot be decoded: an image of 13000 x 13000 pixels would take 644.7 MB" in large
    assert f"{folder / '3.png'} cannot be read: is no regular file" in pipe
    assert len(samples(tmp_path / "out" / "train-00000.tar")) == 1


def test_file_names_that_are_no_utf_8(tmp_path) -> None:
    for split in ("train", "val"):
        folder = tmp_path / "in" / split / os.fsdecode(b"caf\xe9")
        image(folder, "a.png")
        (folder / os.fsdecode(b"b\xff.png")).write_bytes(b"no image")
    assert preprocess("image-folder", tmp_path, "--skip-broken") == 0
    index = read_index(tmp_path / "out")
    assert index.classes == ["caf\\xe9"]
    assert all("caf\\xe9/b\\xff.png" in reason for shard in index.shards for reason in shard.broken)
    assert [shard.samples for shard in index.shards] == [1, 1]


def test_the_bound_of_a_sample_is_a_flag(tmp_path, capsys) -> None:
    (tmp_path / "in" / "cat").mkdir(parents=True)
    Image.new("RGB", (600, 600)).save(tmp_path / "in" / "cat" / "1.png")
    assert preprocess("image-folder", tmp_path, "--max-sample-mb", 1) == 1
    assert "an image of 600 x 600 pixels would take 1.4 MB, and a sample may take 1; if it is sound, raise --max" in (
        capsys.readouterr().err
    )
    assert preprocess("image-folder", tmp_path, "--max-sample-mb", 2) == 0
    assert preprocess("image-folder", tmp_path, "--max-sample-mb", 0) == 1


@pytest.mark.parametrize("name", ["../secret", "/etc", "a/../../secret"])
def test_lists_name_what_is_in_the_folder(tmp_path, capsys, name) -> None:
    image(tmp_path / "secret", "1.png")
    image(tmp_path / "in" / "cat", "1.png")
    (tmp_path / "classes.txt").write_text(f"cat\n{name}\n")
    assert preprocess("image-folder", tmp_path, "--class-list", tmp_path / "classes.txt") == 1
    assert f"{name!r} leads out of the folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value"),
    [("file", "../secret.tar"), ("samples", -1), ("samples", "5"), ("size", 2**70), ("sha256", "x"), ("broken", [1])],
)
def test_an_index_is_read_field_by_field(tmp_path, capsys, field, value) -> None:
    image(tmp_path / "in" / "cat", "1.png")
    assert preprocess("image-folder", tmp_path) == 0
    path = tmp_path / "out" / "index.json"
    index = json.loads(path.read_text())
    index["shards"][0][field] = value
    path.write_text(json.dumps(index))
    assert preprocess_data.main(["verify", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert f"{path}: shards[0].{field}" in error and "make the shards again" in error
