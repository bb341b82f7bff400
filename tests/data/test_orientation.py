"""Photographs are turned upright by their EXIF data, so that masks of their pixels fit."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from megasnn.data.arrays import ArrayFile, ArrayFormat
from megasnn.data.datasets import ShardDataset
from megasnn.data.images import ImageFormat
from megasnn.data.samples import BrokenSample
from megasnn.data.shards import open_shard
from tests.data.shard_files import image_file, write_shard

SIZE = 16
FORMAT = ArrayFormat(
    (ArrayFile("images", "", (3, SIZE, SIZE), "float"), ArrayFile("mask", "seg.png", (SIZE, SIZE), "int", 2)),
    ("images",),
    "mask",
    ImageFormat(SIZE, 3),
)


def photograph(mask: np.ndarray, orientation: int, kind: str, exif: bytes | None = None) -> bytes:
    """File whose image is white where the mask is 1 once it is turned upright."""
    upright, tag = Image.fromarray(mask * np.uint8(255)), Image.Exif()
    tag[ExifTags.Base.Orientation] = orientation
    for stored in (upright.transpose(turn) for turn in Image.Transpose):  # and the image itself, of orientation 1
        with_tag = Image.open(io.BytesIO(saved(stored, "PNG", tag))).convert("L")
        if np.array_equal(np.asarray(ImageOps.exif_transpose(with_tag)), np.asarray(upright)):
            return saved(stored, kind, tag if exif is None else exif)
    return saved(upright, kind, tag if exif is None else exif)


def saved(image: Image.Image, kind: str, exif: Image.Exif | bytes) -> bytes:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))
    return buffer.getvalue()


def corner(height: int, width: int) -> np.ndarray:
    """No turn or mirror image of it is like another."""
    mask = np.zeros((height, width), np.uint8)
    mask[: height // 2, width // 2 - height // 2 : width // 2 - height // 4] = 1
    mask[: height // 4, width // 2 - height // 2 : width // 2 + height // 4] = 1
    return mask


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("kind", "scale"), [("JPEG", 1), ("JPEG", 8), ("PNG", 1), ("WEBP", 1)])
def test_an_image_is_turned_with_its_mask(orientation, kind, scale):
    """Of eight times the size, a JPEG is decoded smaller."""
    mask = corner(SIZE * scale, 24 * scale)
    pixels = ImageFormat(SIZE, 3).decode(photograph(mask, orientation, kind))
    left = (24 - SIZE) // 2
    expected = corner(SIZE, 24)[:, left : left + SIZE]
    assert np.abs(pixels[..., 0] / 255 - expected).mean() < 0.03


def dataset(tmp_path, image: bytes, mask: np.ndarray) -> ShardDataset:
    shard = write_shard(tmp_path / "a.tar", {"a": {"jpg": image, "seg.png": image_file(mask)}})
    return ShardDataset([open_shard(shard)], FORMAT, 0)


def test_a_turned_photograph_and_its_upright_mask_are_one_sample(tmp_path):
    mask = corner(SIZE, 24)
    sample = dataset(tmp_path, photograph(mask, 6, "JPEG"), mask).sample(0)
    assert (sample["mask"] == (sample["images"][..., 0] > 127)).mean() > 0.97


@pytest.mark.parametrize("shape", [(24, SIZE), (SIZE, SIZE), (2 * SIZE, 48)])
def test_a_mask_of_another_size_is_a_broken_sample(tmp_path, shape):
    wrong = dataset(tmp_path, photograph(corner(SIZE, 24), 6, "JPEG"), np.zeros(shape, np.uint8))
    with pytest.raises(
        BrokenSample, match=f"'a' of .*seg.png has {shape[1]} x {shape[0]} pixels, and its image 24 x 16"
    ):
        wrong.sample(0)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("exif", [b"Exif\0\0MM\0*\0\0\xff\xff" + bytes(20), b"Exif\0\0none", b"Exif\0\0MM\0*"])
def test_a_photograph_with_damaged_exif_data_stays_as_it_is(exif):
    mask = corner(SIZE, SIZE)
    content = photograph(mask, 1, "JPEG", exif)
    assert np.abs(ImageFormat(SIZE, 3).decode(content)[..., 0] / 255 - mask).mean() < 0.03
