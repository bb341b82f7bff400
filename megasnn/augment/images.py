"""Random changes to images, uint8 `[H, W, C]`: cropping, mirroring, RandAugment, erased rectangles.

RandAugment (Cubuk et al. 2019, arXiv 1909.13719) changes Pillow images, with timm's operations, ranges and names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from megasnn.common.random import keyed_numbers

Fill = tuple[int, ...]
"""Colour of pixels from outside the image, one value per channel."""
CropBox = tuple[int, int, int, int]
"""Left, top, right, bottom."""
OPERATION_NAMES = (
    "auto-contrast",
    "equalize",
    "invert",
    "rotate",
    "posterize",
    "solarize",
    "solarize-add",
    "color",
    "contrast",
    "brightness",
    "sharpness",
    "shear-x",
    "shear-y",
    "translate-x",
    "translate-y",
)
"""Operations, by the number drawn."""
CROP_SHAPE = 4 / 3  # largest ratio of a crop's sides
_ENHANCERS = {name: getattr(ImageEnhance, name.title()) for name in ("color", "contrast", "brightness", "sharpness")}
_STRONGEST = 10.0  # magnitude at the end of each operation's range
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
_FORM = rf"rand-m{_NUMBER}(?:-n([1-9]))?(?:-mstd{_NUMBER})?-inc1"
_MARGIN = 4  # pixels
_ATTEMPTS = 10  # to draw a part that fits
_ERASED = (0.02, 1 / 3)  # fraction of the image's area
_ERASED_SHAPE = 0.3  # smallest ratio of height to width; its inverse is the largest


@dataclass(frozen=True)
class RandAugment:
    """Draws `count` operations; applies each with probability 1/2.

    Attributes:
        magnitude: strength from 0 to 10 (m).
        count: operations per image (n).
        deviation: the magnitude's standard deviation (mstd); it is clamped to 0..10.
        names: operations to draw from.
    """

    magnitude: float
    count: int = 2
    deviation: float = 0.0
    names: tuple[str, ...] = OPERATION_NAMES

    def __call__(self, image: Image.Image, draws: np.random.Generator, fill: Fill) -> Image.Image:
        # timm draws all operations before the first magnitude.
        chosen_numbers = [draws.integers(len(self.names)) for _ in range(self.count)]
        for chosen in chosen_numbers:
            if draws.random() < 0.5:
                magnitude = self.magnitude
                if self.deviation:
                    magnitude += self.deviation * draws.normal()
                strength = max(0.0, min(magnitude, _STRONGEST)) / _STRONGEST
                image = operate(self.names[chosen], image, strength, draws, fill)
        return image


def parse_rand_augment(text: str, only: str | None = None) -> RandAugment:
    """Parses timm's name for a RandAugment. Raises ValueError for another text.

    Args:
        only: comma-separated operations to draw from; None for all.
    """
    found = re.fullmatch(_FORM, text[:80])
    if not found:
        raise ValueError(f"--rand-augment {text[:80]}: write it as rand-m9-n2-mstd0.5-inc1; n and mstd are optional")
    names: tuple[str, ...] = OPERATION_NAMES
    if only is not None:
        names = tuple(name.strip() for name in only.split(","))
    for name in names:
        if name not in OPERATION_NAMES:
            raise ValueError(
                f"--rand-augment: there is no operation {name[:80]!r}; there are {', '.join(OPERATION_NAMES)}"
            )
    return RandAugment(float(found[1]), int(found[2] or 2), float(found[3] or 0), names)


def operate(name: str, image: Image.Image, strength: float, draws: np.random.Generator, fill: Fill) -> Image.Image:
    """Applies one operation; `strength` from 0 to 1 (timm's increasing variants)."""
    match name:
        case "auto-contrast":
            return ImageOps.autocontrast(image)
        case "equalize":
            return ImageOps.equalize(image)
        case "invert":
            return ImageOps.invert(image)
        case "rotate":
            return image.rotate(_sign(draws) * 30 * strength, Image.Resampling.BICUBIC, fillcolor=fill)
        case "posterize":
            # Keep the upper bits of each value; with 0 bits the image is black.
            bits = max(0, 4 - int(4 * strength))
            return _by_value(image, [value >> 8 - bits << 8 - bits for value in range(256)])
        case "solarize":
            return ImageOps.solarize(image, 256 - int(256 * strength))
        case "solarize-add":
            added = int(110 * strength)
            return _by_value(image, [min(255, value + added) if value < 128 else value for value in range(256)])
        case "shear-x":
            return _affine(image, (1, 0.3 * _sign(draws) * strength, 0, 0, 1, 0), fill)
        case "shear-y":
            return _affine(image, (1, 0, 0, 0.3 * _sign(draws) * strength, 1, 0), fill)
        case "translate-x":
            return _affine(image, (1, 0, 0.45 * _sign(draws) * strength * image.width, 0, 1, 0), fill)
        case "translate-y":
            return _affine(image, (1, 0, 0, 0, 1, 0.45 * _sign(draws) * strength * image.height), fill)
        case _:
            return _ENHANCERS[name](image).enhance(max(0.1, 1 + _sign(draws) * 0.9 * strength))


def _sign(draws: np.random.Generator) -> int:
    return -1 if draws.integers(2) else 1


def _affine(image: Image.Image, matrix: tuple[float, ...], fill: Fill) -> Image.Image:
    # Pillow's matrix leads from a pixel of the result to its source.
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=fill)


def _by_value(image: Image.Image, values: list[int]) -> Image.Image:
    # Pillow takes the tables of all bands, one behind another.
    return image.point(values * len(image.getbands()))


@dataclass(frozen=True)
class ImageRecipe:
    """Image changes in addition to `--augment`.

    Attributes:
        crop_scale: smallest area fraction in a random crop.
    """

    crop_scale: float = 0.08
    rand_augment: RandAugment | None = None
    erasing: float = 0.0


def crop_and_flip(image: NDArray[Any], seed: int, epoch: int, sample: int, margin: int = _MARGIN) -> NDArray[Any]:
    """The usual CIFAR recipe: shift by up to `margin` pixels each way, fill with black, mirror half of the images."""
    draws = keyed_numbers(seed, "augment", epoch, sample)
    down = draws.integers(2 * margin + 1) - margin
    right = draws.integers(2 * margin + 1) - margin
    shifted = np.zeros_like(image)
    height, width = image.shape[:2]
    shifted[max(-down, 0) : height - max(down, 0), max(-right, 0) : width - max(right, 0)] = image[
        max(down, 0) : height - max(-down, 0), max(right, 0) : width - max(-right, 0)
    ]
    return shifted[:, ::-1] if draws.integers(2) else shifted


def flip(image: NDArray[Any], seed: int, epoch: int, sample: int) -> NDArray[Any]:
    """Mirrors half of the images."""
    return image[:, ::-1] if keyed_numbers(seed, "flip", epoch, sample).integers(2) else image


def random_box(size: tuple[int, int], scale: float, ratio: float, draws: np.random.Generator) -> CropBox:
    """Random box with `scale` to 1 of the area and width / height in [1 / ratio, ratio]; `size`: width, height.

    Szegedy et al. 2015 (arXiv 1409.4842), as in torchvision and timm.
    """
    width, height = size
    for _ in range(_ATTEMPTS):
        area = width * height * draws.uniform(scale, 1)
        # Uniform in the logarithm: wide and high boxes are equally likely.
        shape = math.exp(draws.uniform(-math.log(ratio), math.log(ratio)))
        w = round(math.sqrt(area * shape))
        h = round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            top = int(draws.integers(height - h + 1))
            left = int(draws.integers(width - w + 1))
            return left, top, left + w, top + h
    # No attempt fits: the largest allowed box in the middle.
    w = min(width, round(height * ratio))
    h = min(height, round(width * ratio))
    left = (width - w) // 2
    top = (height - h) // 2
    return left, top, left + w, top + h


def erase(image: NDArray[Any], probability: float, mean: Sequence[float], draws: np.random.Generator) -> NDArray[Any]:
    """Replaces 2 to 33 percent of the area by the mean (Zhong et al. 2017, arXiv 1708.04896; timm's "const")."""
    if draws.random() >= probability:
        return image
    height, width, _ = image.shape
    for _ in range(_ATTEMPTS):
        area = height * width * draws.uniform(*_ERASED)
        shape = math.exp(draws.uniform(math.log(_ERASED_SHAPE), -math.log(_ERASED_SHAPE)))
        h = round(math.sqrt(area * shape))
        w = round(math.sqrt(area / shape))
        # As in timm, a rectangle never reaches over a whole side.
        if h < height and w < width:
            top = draws.integers(height - h + 1)
            left = draws.integers(width - w + 1)
            erased = image.astype(np.float32)  # means have fractions
            erased[top : top + h, left : left + w] = mean
            return erased
    return image
