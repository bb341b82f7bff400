"""Random changes of images, uint8 `[H, W, C]`: cropping, mirroring, colours, erased rectangles, RandAugment.

RandAugment (Cubuk et al. 2019, arXiv 1909.13719) works on Pillow images, with timm's operations, ranges and names.
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
OPERATION_NAMES = (
    *("auto-contrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize-add"),
    *("color", "contrast", "brightness", "sharpness", "shear-x", "shear-y", "translate-x", "translate-y"),
)
"""Operations, in the order in which numbers choose them."""
_ENHANCERS = {name: getattr(ImageEnhance, name.title()) for name in ("color", "contrast", "brightness", "sharpness")}
_STRONGEST = 10.0  # the magnitude that stands for the end of each operation's range
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
_FORM = rf"rand-m{_NUMBER}(?:-n([1-9]))?(?:-mstd{_NUMBER})?-inc1"
_MARGIN = 4
_ATTEMPTS = 10  # to find a part of the wanted size and shape that fits
_ERASED = (0.02, 1 / 3)  # shares of the image
CROP_SHAPE = 4 / 3  # a crop's longer side by its shorter one, at most
_ERASED_SHAPE = 0.3  # the flattest rectangle's height by its width, and the steepest one's width by its height
CropBox = tuple[int, int, int, int]
"""Left, top, right, bottom."""


@dataclass(frozen=True)
class RandAugment:
    """Some operations in turn, each with even chances one of those there are, applied or left out.

    Attributes:
        magnitude: how strong, of 10 (m).
        count: how many operations are chosen (n).
        deviation: of the magnitude, which is normal about its mean and cut to 0 and 10 (mstd).
        names: of the operations there are.
    """

    magnitude: float
    count: int = 2
    deviation: float = 0.0
    names: tuple[str, ...] = OPERATION_NAMES

    def __call__(self, image: Image.Image, draws: np.random.Generator, fill: Fill) -> Image.Image:
        """Args: fill: what moves in from outside the image."""
        for chosen in [draws.integers(len(self.names)) for _ in range(self.count)]:
            if draws.random() < 0.5:
                magnitude = self.magnitude
                if self.deviation:
                    magnitude += self.deviation * draws.normal()
                strength = max(0.0, min(magnitude, _STRONGEST)) / _STRONGEST
                image = operate(self.names[chosen], image, strength, draws, fill)
        return image


def parse_rand_augment(text: str, only: str | None = None) -> RandAugment:
    """Parses timm's name of a variant. Raises ValueError for another text.

    Args:
        only: names of operations with commas between them; None for all.
    """
    found = re.fullmatch(_FORM, text[:80])
    if not found:
        raise ValueError(f"--rand-augment {text[:80]}: it is written like rand-m9-n2-mstd0.5-inc1; n and mstd may lack")
    names = OPERATION_NAMES if only is None else tuple(name.strip() for name in only.split(","))
    if unknown := [name for name in names if name not in OPERATION_NAMES]:
        raise ValueError(
            f"--rand-augment: there is no operation {unknown[0][:80]!r}; there are {', '.join(OPERATION_NAMES)}"
        )
    return RandAugment(float(found[1]), int(found[2] or 2), float(found[3] or 0), names)


def operate(name: str, image: Image.Image, strength: float, draws: np.random.Generator, fill: Fill) -> Image.Image:
    """Applies one operation, the stronger the larger `strength` is, from 0 to 1 (timm's increasing variants)."""
    match name:
        case "auto-contrast":
            return ImageOps.autocontrast(image)
        case "equalize":
            return ImageOps.equalize(image)
        case "invert":
            return ImageOps.invert(image)
        case "rotate":
            return image.rotate(_sign(draws) * 30 * strength, Image.Resampling.BICUBIC, fillcolor=fill)
        case "posterize":  # keeps the upper bits of each value; none of them is black
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
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=fill)


def _by_value(image: Image.Image, values: list[int]) -> Image.Image:
    return image.point(values * len(image.getbands()))


@dataclass(frozen=True)
class ImageRecipe:
    """Changes of images beside what `--augment` names.

    Attributes:
        crop_scale: the least share of an image's area that a random crop keeps.
        rand_augment: None changes nothing.
        erasing: the share of images that lose a rectangle.
    """

    crop_scale: float = 0.08
    rand_augment: RandAugment | None = None
    erasing: float = 0.0


def crop_and_flip(image: NDArray[Any], seed: int, epoch: int, sample: int, margin: int = _MARGIN) -> NDArray[Any]:
    """The usual CIFAR recipe on uint8 `[H, W, C]`: cut out of a black frame, mirror half of them.

    Same shape out. Shifts are uniform over the 9 × 9 positions that a frame of 4 pixels has.
    """
    draws = keyed_numbers(seed, "augment", epoch, sample)
    down, right = (draws.integers(2 * margin + 1) - margin for _ in range(2))
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
    """A part of `scale` to all of an image's area, `1 / ratio` to `ratio` times as wide as high, anywhere in it.

    Where ten attempts give none that fits, the largest part in the middle of an allowed shape. Szegedy et al. 2015
    (arXiv 1409.4842), as torchvision and timm draw it.

    Args:
        size: width and height of the image.
    """
    width, height = size
    for _ in range(_ATTEMPTS):
        area = width * height * draws.uniform(scale, 1)
        shape = math.exp(draws.uniform(-math.log(ratio), math.log(ratio)))
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(draws.integers(height - h + 1)), int(draws.integers(width - w + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * ratio)), min(height, round(width * ratio))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def erase(image: NDArray[Any], probability: float, mean: Sequence[float], draws: np.random.Generator) -> NDArray[Any]:
    """Replaces a rectangle of 2 to 33 percent of the area by the mean (Zhong et al. 2017, arXiv 1708.04896).

    As timm does it in mode "const": zero once the image is normalised. An erased image is float32, since means are no
    whole numbers.
    """
    if draws.random() >= probability:
        return image
    height, width, _ = image.shape
    for _ in range(_ATTEMPTS):
        area = height * width * draws.uniform(*_ERASED)
        shape = math.exp(draws.uniform(math.log(_ERASED_SHAPE), -math.log(_ERASED_SHAPE)))
        h, w = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if h < height and w < width:
            break
    else:
        return image
    top, left = draws.integers(height - h + 1), draws.integers(width - w + 1)
    erased = image.astype(np.float32)
    erased[top : top + h, left : left + w] = mean
    return erased
