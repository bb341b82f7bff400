"""Folders as people have them: all that can be read is taken, the rest is counted, keys and classes are one to one."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from megasnn.data.images import ImageFormat
from megasnn.data.shards import read_index
from tests.data.preprocess.test_sets import dvs128, labels, put, recording, refusal, run, shards

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
KINDS = {
    **{"bmp": "BMP", "gif": "GIF", "tif": "TIFF", "tiff": "TIFF"},
    **{"pgm": "PPM", "pnm": "PPM", "ppm": "PPM", "png": "PNG", "webp": "WEBP"},
}


def saved(path: Path, kind: str, pixels: np.ndarray = PIXELS, **options) -> None:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    put(path, buffer.getvalue())


def decoded(data: bytes) -> np.ndarray:
    return ImageFormat(8, 1).decode(data)[..., 0]


def test_every_kind_of_image_is_taken(tmp_path) -> None:
    for ending, kind in KINDS.items():
        saved(
            tmp_path / "in" / "cat" / f"{ending}.{ending.upper()}",
            kind,
            **({"lossless": True} if kind == "WEBP" else {}),
        )
    saved(tmp_path / "in" / "cat" / "jfif.jfif", "JPEG")
    found = shards(tmp_path, "image-folder")["train"]
    assert sorted(found) == sorted(f"cat_{ending}" for ending in (*KINDS, "jfif"))
    for key, (_, data) in found.items():
        assert key == "cat_jfif" or np.array_equal(decoded(data), PIXELS), key
    assert set(read_index(tmp_path / "out").shards[0].members.suffixes) == {"jpg", "png", "ppm", "webp"}


def test_images_of_other_formats_keep_colours_and_stand_upright(tmp_path) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 3
    saved(tmp_path / "in" / "cat" / "turned.tif", "TIFF", colours[::-1, ::-1], exif=turned)
    saved(tmp_path / "in" / "cat" / "colours.bmp", "BMP", colours)
    Image.fromarray(colours).convert("CMYK").save(tmp_path / "in" / "cat" / "print.tif")
    found = shards(tmp_path, "image-folder")["train"]
    for key, (_, data) in found.items():
        assert np.abs(ImageFormat(8, 3).decode(data).astype(int) - colours).max() <= (key == "cat_print"), key


def test_a_file_of_several_images_is_named(tmp_path, capsys) -> None:
    images = [Image.fromarray(PIXELS), Image.fromarray(PIXELS.T)]
    (tmp_path / "in" / "cat").mkdir(parents=True)
    images[0].save(tmp_path / "in" / "cat" / "film.gif", save_all=True, append_images=images[1:])
    assert "film.gif cannot be decoded: it holds 2 images" in refusal(tmp_path, capsys, "image-folder")


def test_files_of_a_class_lie_at_any_depth(tmp_path) -> None:
    """Links that lead in a circle are followed once."""
    for path in ("cat/1.png", "cat/b/2.png", "cat/b/c/d/10.png", "dog/1.png"):
        saved(tmp_path / "in" / path, "PNG")
    (tmp_path / "in" / "cat" / "b" / "circle").symlink_to(tmp_path / "in" / "cat")
    found = labels(shards(tmp_path, "image-folder")["train"])
    assert found == {"cat_1": 0, "cat_b_2": 0, "cat_b_c_d_10": 0, "dog_1": 1}


@pytest.mark.parametrize("name", ["val", "valid", "validation", "Validation"])
def test_names_of_the_validation_split(tmp_path, name) -> None:
    for split in ("train", name):
        saved(tmp_path / "in" / split / "cat" / "1.png", "PNG")
    assert sorted(shards(tmp_path, "image-folder")) == ["train", "val"]


def test_two_folders_of_a_split_are_refused(tmp_path, capsys) -> None:
    for split in ("train", "val", "valid"):
        saved(tmp_path / "in" / split / "cat" / "1.png", "PNG")
    assert "in/val and " in (told := refusal(tmp_path, capsys, "image-folder")) and "in/valid are both" in told


def test_what_is_left_out_is_counted_and_named(tmp_path, capsys) -> None:
    saved(tmp_path / "in" / "train" / "cat" / "1.png", "PNG")
    for path in ("train/cat/2.npy", "train/cat/3.npy", "train/cat/.hidden", "extra/cat/4.png", "LICENSE"):
        put(tmp_path / "in" / path, b"something")
    shards(tmp_path, "image-folder")
    told = capsys.readouterr().out
    assert "4 files that are no samples" in told and "(1 without an ending, 2 .npy, 1 .png), such as " in told
    put(tmp_path / "events" / "in" / "train" / "cat" / "1.aedat", dvs128(recording(1)))
    put(tmp_path / "events" / "in" / "test" / "cat" / "1.aedat", dvs128(recording(2)))
    shards(tmp_path / "events", "event-folder", "--keep-events")
    assert "left out" not in capsys.readouterr().out


@pytest.mark.parametrize("per_shard", [1, 500])
def test_keys_are_one_to_one_wherever_shards_end(tmp_path, per_shard) -> None:
    paths = ["1.jpg", "1.png", "1.webp", "1_2.png", "cat_1.png", "a.b.png", "a_b.png", "a/b.png"]
    for path in paths:
        saved(tmp_path / "in" / "cat" / path, "JPEG" if path.endswith("jpg") else path.rpartition(".")[2].upper())
    shards(tmp_path, "image-folder", "--samples-per-shard", per_shard)
    keys = [key for shard in read_index(tmp_path / "out").shards for key in shard.members.keys]
    assert len(set(keys)) == len(keys) == len(paths) and {"cat_1", "cat_1_2", "cat_a_b"} < set(keys)


def test_reasons_are_the_same_in_every_run(tmp_path) -> None:
    contents = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        saved(folder / "in" / "cat" / "1.png", "PNG")
        put(folder / "in" / "cat" / "2.png", b"no image")
        assert run("image-folder", "--input", folder / "in", "--output", folder / "out", "--skip-broken") == 0
        contents.append((folder / "out" / "index.json").read_text().replace(str(folder), ""))
    assert contents[0] == contents[1] and "2.png" in contents[0]
    assert len({hashlib.sha256(content.encode()).hexdigest() for content in contents}) == 1


def test_classes_are_numbered_as_those_of_another_folder(tmp_path, capsys) -> None:
    for name in ("cat", "dog", "owl"):
        saved(tmp_path / "train" / "in" / name / "1.png", "PNG")
    for name in ("dog", "owl"):
        saved(tmp_path / "in" / name / "1.png", "PNG")
    assert labels(shards(tmp_path / "train", "image-folder")["train"]) == {"cat_1": 0, "dog_1": 1, "owl_1": 2}
    flags = ("--classes-of", tmp_path / "train" / "out")
    assert labels(shards(tmp_path, "image-folder", *flags)["train"]) == {"dog_1": 1, "owl_1": 2}
    assert read_index(tmp_path / "out").classes == ["cat", "dog", "owl"]
    os.rename(tmp_path / "out", tmp_path / "before")
    saved(tmp_path / "in" / "yak" / "1.png", "PNG")
    assert "has no 'yak'" in refusal(tmp_path, capsys, "image-folder", *flags)
    assert "--classes-of" in refusal(tmp_path, capsys, "image-folder", "--classes-of", tmp_path / "train")
