"""Images: from the bytes of a file to normalised numbers of the model's size and channels."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from megasnn.augment import IMAGES, Augmentation
from megasnn.augment.images import Box, ImageChange, ImageRecipe
from megasnn.data.formats import SampleFormat
from megasnn.files import SAMPLE_BYTES, require_size

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
_ONE_BYTE_MODES = ("1", "L", "P")  # Pillow keeps four bytes for a pixel of all others


def open_image(data: bytes, limit: int = SAMPLE_BYTES) -> Image.Image:
    """Opens an image file without decoding it yet.

    Args:
        data: the whole file.
        limit: bytes that the decoded image may take. A WebP takes up to 2 GB (16,383 x 16,383) before it is known.

    Raises:
        ValueError: too large, damaged, of another format, or more than 8 bits a channel.
    """
    Image.MAX_IMAGE_PIXELS = None  # Pillow's own bound counts pixels, whatever `limit` is
    try:
        file = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Exception as error:  # Pillow has no common class for what damaged bytes make it raise
        raise ValueError(f"it is no sound image of {', '.join(_FORMATS)}: {error}") from error
    if file.mode == "F" or file.mode.startswith("I"):
        raise ValueError(f"more than 8 bits a channel (mode {file.mode})")
    width, height = file.size
    pixel_bytes = 1 if file.mode in _ONE_BYTE_MODES else 4
    require_size(f"an image of {width} x {height} pixels", width * height * pixel_bytes, limit)
    return file


@dataclass(frozen=True)
class ImageFormat(SampleFormat):
    """Images as a model takes them.

    Attributes:
        size: height and width in pixels.
        channels: 1 (grey) or 3 (RGB).
        normalisation: a name in NORMALISATIONS.
        limit: bytes that a sample may take, in its file or decoded.
        recipe: random changes in training beside those of `--augment`.
        center: share of the shorter side that the middle of an image keeps.
    """

    size: int
    channels: int
    normalisation: str = "generic"
    limit: int = SAMPLE_BYTES
    recipe: ImageRecipe = ImageRecipe()
    center: float = 1.0
    suffixes = IMAGE_SUFFIXES
    kind = IMAGES
    axes = (0, 3, 1, 2)  # the channels lie last in memory, as convolutions like it

    def __post_init__(self) -> None:
        if self.channels not in _MODES:
            raise ValueError(f"images have 1 or 3 channels, not {self.channels}; set --in-channels to 1 or 3")

    def augmentation(self, name: str) -> Augmentation:
        """A random change by its name, and behind it those of the recipe. Raises ValueError as for other samples."""
        found = super().augmentation(name)
        mean = np.broadcast_to(NORMALISATIONS[self.normalisation][0], self.channels).tolist()
        change = ImageChange(found.change, self.recipe, tuple(255 * value for value in mean))
        return replace(found, change=change, decoder=self.part_decoder if found.crops else None)

    def part_decoder(self, seed: int, epoch: int, sample: int) -> Callable[[bytes], np.ndarray]:
        """Like `decode`, for a random part of the image instead of the middle (bicubic)."""
        return partial(self._decode, part=partial(self.recipe.box, seed=seed, epoch=epoch, sample=sample))

    def decode(self, data: bytes) -> np.ndarray:
        """Decodes an image file to uint8 `[size, size, channels]`.

        An image of exactly this size is not touched, unless `center` is below 1. Otherwise the middle is cut out and
        scaled to `size` (bilinear, with averaging when it shrinks). Grey becomes RGB by repetition,
        RGB grey by luminance.

        Raises:
            ValueError: damaged bytes, or an image that is too large or of more than 8 bits a channel.
        """
        return self._decode(data)

    def _decode(self, data: bytes, part: Callable[[tuple[int, int]], Box] | None = None) -> np.ndarray:
        """Args: part: of an image of this width and height, instead of the middle."""
        file = open_image(data, self.limit)
        try:
            image = self._middle(file) if part is None else self._part(file, part(file.size))
        except MemoryError:
            raise
        except Exception as error:  # see `open_image`
            raise ValueError(str(error)) from error
        return np.asarray(image, dtype=np.uint8).reshape(self.size, self.size, self.channels)

    def _middle(self, file: Image.Image) -> Image.Image:
        shorter = math.ceil(self.size / self.center)
        if min(file.size) >= 2 * shorter:
            file.draft(_MODES[self.channels], (shorter, shorter))  # JPEG: decode at 1/2, 1/4 or 1/8
        image = file.convert(_MODES[self.channels])
        if image.size == (self.size, self.size) and self.center == 1:
            return image
        return ImageOps.fit(image, (self.size, self.size), Image.Resampling.BILINEAR, bleed=(1 - self.center) / 2)

    def _part(self, file: Image.Image, box: Box) -> Image.Image:
        (width, height), shorter = file.size, min(box[2] - box[0], box[3] - box[1])
        if shorter >= 2 * self.size:
            file.draft(_MODES[self.channels], (width * self.size // shorter, height * self.size // shorter))
        image = file.convert(_MODES[self.channels])
        x, y = image.width / width, image.height / height  # below 1 where a JPEG was decoded smaller
        scaled = box[0] * x, box[1] * y, box[2] * x, box[3] * y
        return image.resize((self.size, self.size), Image.Resampling.BICUBIC, box=scaled)

    def fill(self, values: NDArray[np.float32], sample: NDArray[Any]) -> None:
        """Normalises an image `[size, size, channels]` with values from 0 to 255."""
        values[...] = sample
        scale, shift = _rows(self.normalisation, self.size, self.channels)
        rows = values.reshape(-1, len(scale))
        rows *= scale
        rows -= shift


@functools.cache
def _rows(normalisation: str, size: int, channels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scale and shift of a row of pixels: NumPy is several times faster on rows than on the few numbers of a pixel."""
    mean, deviation = (np.array(each, dtype=np.float32) for each in NORMALISATIONS[normalisation])
    scale, shift = (np.broadcast_to(each, channels) for each in (1 / (255 * deviation), mean / deviation))
    return np.tile(scale, size), np.tile(shift, size)
