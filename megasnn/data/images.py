"""Images: from a file's bytes to normalised pixels in the model's size and channels."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from megasnn.augment import AUGMENTATIONS, IMAGES, Augmentation, SampleKey
from megasnn.augment.images import CROP_SHAPE, ImageRecipe, erase, random_box
from megasnn.common.files import require_size
from megasnn.common.random import keyed_numbers
from megasnn.data.formats import SampleFormat

NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "generic": ((0.5,), (0.25,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "digits": ((0.305,), (0.376,)),
}
"""Mean and standard deviation of each channel, for values in [0, 1]; "generic" suits most photographs."""
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "ppm")
_FORMATS = ("JPEG", "PNG", "WEBP", "PPM")  # Pillow's names
_MODES = {1: "L", 3: "RGB"}
_ONE_BYTE_MODES = ("1", "L", "P")  # Pillow uses four bytes per pixel for all others
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = tuple(_TURNS[number] for number in (5, 6, 7, 8))


def orientation(file: Image.Image) -> Image.Transpose | None:
    """Turn that sets an image upright by its EXIF data, or None. Raises Pillow's errors for a damaged PNG."""
    if file.format == "PNG":
        # Its EXIF data may follow the pixels.
        file.load()
    try:
        return _TURNS.get(file.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:
        # Damaged EXIF data, as in some ImageNet photographs; Pillow has no common error class.
        return None


def upright_size(file: Image.Image, turn: Image.Transpose | None) -> tuple[int, int]:
    """Width and height after a turn."""
    return file.size[::-1] if turn in _SIDEWAYS else file.size


def open_image(data: bytes, other_format: str | None = None) -> Image.Image:
    """Opens an image file without decoding it.

    Args:
        other_format: Pillow's name of the only format allowed; by default those of training.
    Raises:
        ValueError: too large, damaged, another format, or more than 8 bits per channel.
    """
    # Pillow's own bound counts pixels, `require_size` bytes.
    Image.MAX_IMAGE_PIXELS = None
    formats = _FORMATS if other_format is None else (other_format,)
    try:
        # Pillow decodes a WebP here: up to 2 GB (16,383 x 16,383) before its size is known.
        file = Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        # Its message contains a memory address.
        raise ValueError(f"it is no valid {', '.join(formats)} image") from None
    except Exception as error:
        # Pillow has no common error class.
        raise ValueError(f"it is no valid {', '.join(formats)} image: {error}") from error
    if file.mode == "F" or file.mode.startswith("I"):
        raise ValueError(f"more than 8 bits per channel (mode {file.mode})")
    width, height = file.size
    pixel_bytes = 1 if file.mode in _ONE_BYTE_MODES else 4
    require_size(f"an image of {width} x {height} pixels", width * height * pixel_bytes)
    return file


@dataclass(frozen=True)
class ImageFormat(SampleFormat):
    """Images in a model's size and channels.

    Attributes:
        size: height and width in pixels.
        recipe: random changes besides `augment`.
        center: fraction of the shorter side in the center crop.
    """

    size: int
    channels: int
    normalisation: str = "generic"
    recipe: ImageRecipe = ImageRecipe()
    center: float = 1.0
    augment: Augmentation = AUGMENTATIONS["none"]
    suffixes = IMAGE_SUFFIXES
    kind = IMAGES

    def __post_init__(self) -> None:
        if self.channels not in _MODES:
            raise ValueError(f"images have 1 or 3 channels, not {self.channels}; set --in-channels to 1 or 3")

    def decoded(self, data: bytes, key: SampleKey | None) -> NDArray[Any]:
        """Decodes an image to `[size, size, channels]`, uint8, or float32 after erasing.

        Scales the upright image's middle square to `size` (bilinear, antialiased), or a random part if `augment` crops
        (bicubic). Converts grey to RGB by repetition, RGB to grey by luminance.
        """
        image = self._scaled(open_image(data), key)
        pixels = np.asarray(image, dtype=np.uint8).reshape(self.size, self.size, self.channels)
        return self._changed(pixels, key) if key else pixels

    def _scaled(self, file: Image.Image, key: SampleKey | None) -> Image.Image:
        mode = _MODES[self.channels]
        turn = orientation(file)
        width, height = upright_size(file, turn)
        side = self.center * min(width, height)
        left = (width - side) / 2
        top = (height - side) / 2
        right = left + side
        bottom = top + side
        resample = Image.Resampling.BILINEAR
        # A random crop is cut before scaling, from the original pixels.
        if key and self.augment.crops:
            seed, epoch, sample = key
            draws = keyed_numbers(seed, "crop", epoch, sample)
            left, top, right, bottom = random_box((width, height), self.recipe.crop_scale, CROP_SHAPE, draws)
            resample = Image.Resampling.BICUBIC
        shorter = min(right - left, bottom - top)
        # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size, which is much faster.
        if shorter >= 2 * self.size:
            smaller = (int(file.width * self.size / shorter), int(file.height * self.size / shorter))
            file.draft(mode, smaller)
        image = file.convert(mode)
        if turn is not None:
            image = image.transpose(turn)
        # Below 1 for a JPEG decoded smaller.
        x = image.width / width
        y = image.height / height
        return image.resize((self.size, self.size), resample, box=(left * x, top * y, right * x, bottom * y))

    def _changed(self, image: NDArray[Any], key: SampleKey) -> NDArray[Any]:
        image = self.augment.change(image, *key)
        if not (self.recipe.rand_augment or self.recipe.erasing):
            return image
        seed, epoch, sample = key
        means, _ = NORMALISATIONS[self.normalisation]
        mean = tuple(255 * value for value in means * (self.channels // len(means)))
        if self.recipe.rand_augment:
            fill = tuple(min(255, round(value)) for value in mean)
            draws = keyed_numbers(seed, "rand-augment", epoch, sample)
            image = np.asarray(self.recipe.rand_augment(Image.fromarray(image), draws, fill))
        if self.recipe.erasing:
            draws = keyed_numbers(seed, "erasing", epoch, sample)
            image = erase(image, self.recipe.erasing, mean, draws)
        return image

    def batch(self, samples: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        """Joins images `[size, size, channels]` with values 0..255 into normalised `[N, channels, size, size]`."""
        joined = super().batch(samples)
        scale, shift = _rows(self.normalisation, self.size, self.channels)
        for image in joined.reshape(len(samples), -1, len(scale)):
            # One at a time, within the CPU's cache.
            image *= scale
            image -= shift
        # Channels stay last in memory, the faster layout for convolutions.
        return joined.transpose(0, 3, 1, 2)


@functools.cache
def _rows(normalisation: str, size: int, channels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scale and shift for a row of pixels."""
    # NumPy is several times faster with rows than with the few channels of a pixel.
    means, deviations = NORMALISATIONS[normalisation]
    mean = np.array(means, np.float32)
    deviation = np.array(deviations, np.float32)
    scale = np.broadcast_to(1 / (255 * deviation), channels)
    shift = np.broadcast_to(mean / deviation, channels)
    return np.tile(scale, size), np.tile(shift, size)
