"""From the bytes of an image file to numbers: decoding, size, channels, normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from megasnn.augment import IMAGES
from megasnn.data.formats import SampleFormat
from megasnn.data.image_files import open_image
from megasnn.files.sample_size import SAMPLE_BYTES

# Mean and standard deviation of a channel, of pixel values in [0, 1]. "generic" brings any photograph to
# about zero mean and unit variance; the first batch norm takes care of the rest.
NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "generic": ((0.5,), (0.25,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "digits": ((0.305,), (0.376,)),
}
_MODES = {1: "L", 3: "RGB"}
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "ppm")


@dataclass(frozen=True)
class ImageFormat(SampleFormat):
    """What a model expects of an image.

    size: height and width in pixels.
    channels: 1 (grey) or 3 (RGB).
    normalisation: a name in NORMALISATIONS.
    limit: bytes that a sample may take, in its file or decoded.
    """

    size: int
    channels: int
    normalisation: str = "generic"
    limit: int = SAMPLE_BYTES
    suffixes = IMAGE_SUFFIXES
    kind = IMAGES
    axes = (0, 3, 1, 2)  # the channels lie last in memory, as convolutions like it

    def __post_init__(self) -> None:
        if self.channels not in _MODES:
            raise ValueError(f"images have 1 or 3 channels, not {self.channels}; set --in-channels to 1 or 3")

    def decode(self, data: bytes) -> np.ndarray:
        """An image file as uint8 `[size, size, channels]`.

        An image of exactly this size is not touched. Otherwise its shorter side is scaled to `size`
        (bilinear, with averaging when it shrinks) and the middle is cut out. Grey becomes RGB by repetition,
        RGB grey by luminance.

        Raises:
            ValueError: the bytes are no whole image, or one that is too large or of more than 8 bits a channel.
        """
        try:
            file = open_image(data, self.limit)
            if min(file.size) >= 2 * self.size:
                file.draft(_MODES[self.channels], (self.size, self.size))  # JPEG: decode at 1/2, 1/4 or 1/8
            image = file.convert(_MODES[self.channels])
            if image.size != (self.size, self.size):
                image = ImageOps.fit(image, (self.size, self.size), Image.Resampling.BILINEAR)
        except MemoryError:
            raise
        except Exception as error:  # Pillow has no common class for what damaged bytes make it raise
            raise ValueError(f"cannot be decoded: {error}") from error
        return np.asarray(image, dtype=np.uint8).reshape(self.size, self.size, self.channels)

    def fill(self, values: NDArray[np.float32], batch: list[NDArray[np.uint8]]) -> None:
        """uint8 images `[size, size, channels]` of n samples -> normalised `[n, size, size, channels]`."""
        mean, deviation = (np.array(each, dtype=np.float32) for each in NORMALISATIONS[self.normalisation])
        scale, shift = 1 / (255 * deviation), mean / deviation
        for target, image in zip(values, batch, strict=True):
            target[...] = image
        # NumPy is several times faster on rows than on the few numbers of a pixel.
        rows = values.reshape(-1, self.size * self.channels)
        rows *= np.tile(np.broadcast_to(scale, self.channels), self.size)
        rows -= np.tile(np.broadcast_to(shift, self.channels), self.size)
