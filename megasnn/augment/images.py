"""Random changes of images, uint8 `[H, W, C]`: cropping, mirroring, colours, erased rectangles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasnn.augment.rand_augment import RandAugment
from megasnn.random import keyed_numbers

_MARGIN = 4
_ATTEMPTS = 10  # to find a part of the wanted size and shape that fits
_ERASED = (0.02, 1 / 3)  # shares of the image
CROP_SHAPE = 4 / 3  # a crop's longer side by its shorter one, at most
_ERASED_SHAPE = 0.3  # the flattest rectangle's height by its width, and the steepest one's width by its height

Box = tuple[int, int, int, int]
"""Left, top, right, bottom."""


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


def random_box(size: tuple[int, int], scale: float, ratio: float, draws: np.random.Generator) -> Box:
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
