"""Images: all kinds become what the model takes; what is damaged, too deep or no image is refused."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from megasnn.data.images import ImageFormat
from tests.data.shard_files import image_file

noise = np.random.default_rng(0).integers(0, 256, size=(32, 32, 3), dtype=np.uint8)


def test_an_image_of_the_right_size_is_not_touched():
    assert np.array_equal(ImageFormat(32, 3).decode(image_file(noise)), noise)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "PPM"])
@pytest.mark.parametrize("channels", [1, 3])
def test_all_kinds_become_the_channels_of_the_model(kind, channels):
    grey = np.full((32, 32), 100, dtype=np.uint8)
    for pixels in (grey, np.stack([grey] * 3, axis=-1)):
        decoded = ImageFormat(32, channels).decode(image_file(pixels, kind))
        assert decoded.shape == (32, 32, channels)
        assert np.abs(decoded.astype(int) - 100).max() <= 1


def test_another_shape_is_scaled_and_cut_in_the_middle():
    wide = np.zeros((20, 60), dtype=np.uint8)
    wide[:, 20:40] = 200
    assert (ImageFormat(10, 1).decode(image_file(wide))[:, 1:-1] == 200).all()


def test_the_middle_may_be_smaller():
    """0.8 of the shorter side of 40 x 60 is 32 pixels: those from 4 on, and from 14 on along the other side."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    assert np.array_equal(ImageFormat(32, 3, center=0.8).decode(image_file(pixels)), pixels[4:36, 14:46])
    square = image_file(pixels[:32, :32])
    assert ImageFormat(32, 3, center=0.5).decode(square).shape == (32, 32, 3)
    assert np.array_equal(ImageFormat(16, 3, center=0.5).decode(square), pixels[8:24, 8:24])


def test_a_large_jpeg_comes_out_near_the_full_decoding():
    ramp = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 256))
    small = ImageFormat(32, 1).decode(image_file(ramp, "JPEG"))[..., 0].astype(int)
    assert np.abs(small - (np.arange(32)[:, None] * 8 + 4)).max() <= 3


def test_what_would_lose_bits_or_is_no_image_is_refused():
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16)).save(buffer, "PNG")
    with pytest.raises(ValueError, match="more than 8 bits"):
        ImageFormat(8, 1).decode(buffer.getvalue())
    for data in (b"", b"not an image", image_file(noise)[:200], image_file(noise, "JPEG")[:300]):
        with pytest.raises(ValueError, match="."):
            ImageFormat(32, 3).decode(data)
    with pytest.raises(ValueError, match="--in-channels"):
        ImageFormat(32, 2)


def test_normalisation_is_mean_and_deviation_of_the_unit_range():
    batch = noise[None]
    expected = (batch / 255 - [0.4914, 0.4822, 0.4465]) / [0.2470, 0.2435, 0.2616]
    tensor = torch.from_numpy(ImageFormat(32, 3, "cifar10").batch(list(batch)))
    assert np.allclose(tensor.permute(0, 2, 3, 1), expected, atol=1e-5)
    black_and_white = np.array([0, 255], np.uint8).reshape(1, 2, 1)
    assert ImageFormat(2, 1).batch([black_and_white]).flatten().tolist() == [-2, 2]
