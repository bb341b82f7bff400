"""Images: from the bytes of a file to normalised numbers of the model's size and channels."""

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

# Mean and standard deviation of a channel, of pixel values in [0, 1]. "generic" brings any photograph to
# about zero mean and unit variance; the first batch norm takes care of the rest.
NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "generic": ((0.5,), (0.25,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "digits": ((0.305,), (0.376,)),
}
_MODES = {1: "L", 3: "RGB"}
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "ppm")
_FORMATS = ("JPEG", "PNG", "WEBP", "PPM")
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ON_THEIR_SIDE = tuple(_TURNS[number] for number in (5, 6, 7, 8))
_ONE_BYTE_MODES = ("1", "L", "P")  # Pillow keeps four bytes for a pixel of all others


def orientation(file: Image.Image) -> Image.Transpose | None:
    """How a file's pixels are turned to stand upright, by its EXIF data; None where they do, or it is not known.

    Raises as Pillow for a PNG that cannot be decoded.
    """
    if file.format == "PNG":  # EXIF data may stand behind the pixels
        file.load()
    try:
        return _TURNS.get(file.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged EXIF data, as of some of ImageNet's photographs: Pillow has no common class
        return None


def upright_size(file: Image.Image, turn: Image.Transpose | None) -> tuple[int, int]:
    """Width and height of a file's image after a turn."""
    return file.size[::-1] if turn in _ON_THEIR_SIDE else file.size


def open_image(data: bytes, other_format: str | None = None) -> Image.Image:
    """Opens an image file without decoding it yet. A WebP takes up to 2 GB (16,383 x 16,383) before its size is known.

    Args:
        other_format: of Pillow's, in place of those that training decodes.
    Raises:
        ValueError: too large, damaged, of another format, or more than 8 bits a channel.
    """
    Image.MAX_IMAGE_PIXELS = None  # Pillow's own bound counts pixels
    formats = _FORMATS if other_format is None else (other_format,)
    try:
        file = Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:  # its text holds an address
        raise ValueError(f"it is no sound image of {', '.join(formats)}") from None
    except Exception as error:  # Pillow has no common class for what damaged bytes make it raise
        raise ValueError(f"it is no sound image of {', '.join(formats)}: {error}") from error
    if file.mode == "F" or file.mode.startswith("I"):
        raise ValueError(f"more than 8 bits a channel (mode {file.mode})")
    width, height = file.size
    pixel_bytes = 1 if file.mode in _ONE_BYTE_MODES else 4
    require_size(f"an image of {width} x {height} pixels", width * height * pixel_bytes)
    return file


@dataclass(frozen=True)
class ImageFormat(SampleFormat):
    """Images as a model takes them.

    Attributes:
        size: height and width in pixels.
        normalisation: a name in NORMALISATIONS.
        recipe: random changes in training beside `augment`.
        center: share of the shorter side that the middle of an image keeps.
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
        """Decodes an image file to `[size, size, channels]`; with a key it is changed at random.

        It is turned upright by its EXIF data. A square in the middle is scaled to `size` (bilinear, with averaging
        when it shrinks), or a random part where `augment` crops (bicubic). Grey becomes RGB by repetition, RGB grey by
        luminance. The result is uint8, or float32 where a rectangle was erased. Raises ValueError as `open_image`.
        """
        image = self._scaled(open_image(data), key)
        pixels = np.asarray(image, dtype=np.uint8).reshape(self.size, self.size, self.channels)
        return self._changed(pixels, key) if key else pixels

    def _scaled(self, file: Image.Image, key: SampleKey | None) -> Image.Image:
        turn = orientation(file)
        width, height = upright_size(file, turn)
        side = self.center * min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        right, bottom, resample = left + side, top + side, Image.Resampling.BILINEAR
        if key and self.augment.crops:
            seed, epoch, sample = key
            draws, resample = keyed_numbers(seed, "crop", epoch, sample), Image.Resampling.BICUBIC
            left, top, right, bottom = random_box((width, height), self.recipe.crop_scale, CROP_SHAPE, draws)
        shorter = min(right - left, bottom - top)
        if shorter >= 2 * self.size:  # JPEG: decode at 1/2, 1/4 or 1/8
            smaller = int(file.width * self.size / shorter), int(file.height * self.size / shorter)
            file.draft(_MODES[self.channels], smaller)
        image = file.convert(_MODES[self.channels])
        image = image if turn is None else image.transpose(turn)
        x, y = image.width / width, image.height / height  # below 1 where a JPEG was decoded smaller
        return image.resize((self.size, self.size), resample, box=(left * x, top * y, right * x, bottom * y))

    def _changed(self, image: NDArray[Any], key: SampleKey) -> NDArray[Any]:
        image = self.augment.change(image, *key)
        if not (self.recipe.rand_augment or self.recipe.erasing):
            return image
        seed, epoch, sample = key
        mean = NORMALISATIONS[self.normalisation][0]
        mean = tuple(255 * value for value in mean * (self.channels // len(mean)))
        if self.recipe.rand_augment:
            fill = tuple(min(255, round(value)) for value in mean)
            draws = keyed_numbers(seed, "rand-augment", epoch, sample)
            image = np.asarray(self.recipe.rand_augment(Image.fromarray(image), draws, fill))
        if self.recipe.erasing:
            image = erase(image, self.recipe.erasing, mean, keyed_numbers(seed, "erasing", epoch, sample))
        return image

    def batch(self, samples: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        """Joins images `[size, size, channels]` with values from 0 to 255 to normalised `[N, channels, size, size]`.

        The channels stay last in memory, as convolutions like it.
        """
        joined = super().batch(samples)
        scale, shift = _rows(self.normalisation, self.size, self.channels)
        for image in joined.reshape(len(samples), -1, len(scale)):  # one after the other, in the cache
            image *= scale
            image -= shift
        return joined.transpose(0, 3, 1, 2)


@functools.cache
def _rows(normalisation: str, size: int, channels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scale and shift of a row of pixels: NumPy is several times faster on rows than on the few numbers of a pixel."""
    mean, deviation = (np.array(each, dtype=np.float32) for each in NORMALISATIONS[normalisation])
    scale, shift = (np.broadcast_to(each, channels) for each in (1 / (255 * deviation), mean / deviation))
    return np.tile(scale, size), np.tile(shift, size)
