"""RandAugment (Cubuk et al. 2019, arXiv 1909.13719) on Pillow images, with timm's operations, ranges and names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from PIL import Image, ImageEnhance, ImageOps

from megasnn.files.described import in_message
from megasnn.random import Draws

Fill = tuple[int, ...]
Operation = Callable[[Image.Image, float, Draws, Fill], Image.Image]
_STRONGEST = 10.0  # the magnitude that stands for the end of each operation's range
_MOST = 15
_UNIFORM = 100  # a deviation above it stands for a uniform distribution
NAMES = (
    *("auto-contrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize-add"),
    *("color", "contrast", "brightness", "sharpness", "shear-x", "shear-y", "translate-x", "translate-y"),
)
"""The operations, in the order of `_operations`."""
_FORM = "rand-m9-mstd0.5-inc1: rand, then any of m, n, mstd, mmax, p and inc, each with a number"


@dataclass(frozen=True)
class RandAugment:
    """Some operations in turn, each with even chances one of those there are, applied or left out.

    Attributes:
        magnitude: how strong, of 10 (m).
        count: how many operations are chosen (n).
        deviation: of the magnitude, which is normal about its mean; above 100 it is uniform below it (mstd).
        highest: what magnitudes are cut to (mmax).
        probability: that a chosen operation is applied (p).
        increasing: all operations become stronger with the magnitude (inc).
        names: of the operations there are.
    """

    magnitude: float = _STRONGEST
    count: int = 2
    deviation: float = 0.0
    highest: float = _STRONGEST
    probability: float = 0.5
    increasing: bool = False
    names: tuple[str, ...] = NAMES

    def __call__(self, image: Image.Image, draws: Draws, fill: Fill) -> Image.Image:
        """Args: fill: what moves in from outside the image."""
        operations = _INCREASING if self.increasing else _ORIGINAL
        for chosen in [draws.below(len(self.names)) for _ in range(self.count)]:
            if draws.unit() < self.probability:
                operation = operations[NAMES.index(self.names[chosen])]
                image = operation(image, self._magnitude(draws) / _STRONGEST, draws, fill)
        return image

    def _magnitude(self, draws: Draws) -> float:
        magnitude = self.magnitude
        if self.deviation > _UNIFORM:
            magnitude = draws.between(0, magnitude)
        elif self.deviation:
            magnitude += self.deviation * float(draws.normals(1)[0])
        return max(0.0, min(magnitude, self.highest))


def parse_rand_augment(text: str, only: str | None = None) -> RandAugment:
    """What timm's name of a variant stands for. Raises ValueError for another text.

    Args:
        only: names of operations with commas between them; None for all.
    """
    first, *sections = text.split("-")
    values: dict[str, float] = {}
    for section in sections:
        found = re.fullmatch(r"(m|n|mstd|mmax|p|inc)([0-9]{1,9}(?:\.[0-9]{1,9})?)", section)
        if not found or found[1] in values:
            raise ValueError(f"--rand-augment {in_message(text)}: it is written like {_FORM}")
        values[found[1]] = float(found[2])
    if first != "rand":
        raise ValueError(f"--rand-augment {in_message(text)}: it is written like {_FORM}")
    count, increasing, probability = values.get("n", 2.0), values.get("inc", 0.0), values.get("p", 0.5)
    if count not in range(1, _MOST + 1) or increasing not in (0, 1) or probability > 1:
        raise ValueError(f"--rand-augment {text}: n is one of 1 to {_MOST}, inc is 0 or 1, and p at most 1")
    magnitude, highest = values.get("m", _STRONGEST), values.get("mmax", _STRONGEST)
    names = NAMES if only is None else tuple(name.strip() for name in only.split(","))
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(
            f"--rand-augment: there is no operation {in_message(unknown[0])!r}; there are {', '.join(NAMES)}"
        )
    return RandAugment(magnitude, int(count), values.get("mstd", 0.0), highest, probability, increasing == 1, names)


def _plain(change: Callable[[Image.Image], Image.Image]) -> Operation:
    """An operation of one strength."""
    return lambda image, strength, draws, fill: change(image)


def _signed(draws: Draws) -> int:
    return -1 if draws.coin() else 1


def _rotate(image: Image.Image, strength: float, draws: Draws, fill: Fill) -> Image.Image:
    return image.rotate(_signed(draws) * 30 * strength, Image.Resampling.BICUBIC, fillcolor=fill)


def _affine(
    matrix: Callable[[float, tuple[int, int]], tuple[float, ...]],
    image: Image.Image,
    strength: float,
    draws: Draws,
    fill: Fill,
) -> Image.Image:
    data = matrix(_signed(draws) * strength, image.size)
    return image.transform(image.size, Image.Transform.AFFINE, data, Image.Resampling.BICUBIC, fillcolor=fill)


def _posterize(increasing: bool, image: Image.Image, strength: float, draws: Draws, fill: Fill) -> Image.Image:
    """Keeps the upper bits of each value, none of them at the end of the range: then the image is black."""
    bits = int(4 * strength)
    bits = max(0, 4 - bits) if increasing else min(bits, 8)
    return _by_value(image, [value >> 8 - bits << 8 - bits for value in range(256)])


def _solarize(increasing: bool, image: Image.Image, strength: float, draws: Draws, fill: Fill) -> Image.Image:
    threshold = int(256 * strength)
    return ImageOps.solarize(image, 256 - threshold if increasing else threshold)


def _solarize_add(image: Image.Image, strength: float, draws: Draws, fill: Fill) -> Image.Image:
    """Makes the darker half of the values lighter."""
    added = int(110 * strength)
    return _by_value(image, [min(255, value + added) if value < 128 else value for value in range(256)])


def _by_value(image: Image.Image, values: list[int]) -> Image.Image:
    return image.point(values * len(image.getbands()))


def _enhance(
    what: Callable[[Image.Image], Any],
    increasing: bool,
    image: Image.Image,
    strength: float,
    draws: Draws,
    fill: Fill,
) -> Image.Image:
    factor = max(0.1, 1 + _signed(draws) * 0.9 * strength) if increasing else 0.1 + 1.8 * strength
    return what(image).enhance(factor)


def _operations(increasing: bool) -> tuple[Operation, ...]:
    return (
        _plain(ImageOps.autocontrast),
        _plain(ImageOps.equalize),
        _plain(ImageOps.invert),
        _rotate,
        partial(_posterize, increasing),
        partial(_solarize, increasing),
        _solarize_add,
        partial(_enhance, ImageEnhance.Color, increasing),
        partial(_enhance, ImageEnhance.Contrast, increasing),
        partial(_enhance, ImageEnhance.Brightness, increasing),
        partial(_enhance, ImageEnhance.Sharpness, increasing),
        partial(_affine, lambda by, size: (1, 0.3 * by, 0, 0, 1, 0)),
        partial(_affine, lambda by, size: (1, 0, 0, 0.3 * by, 1, 0)),
        partial(_affine, lambda by, size: (1, 0, 0.45 * by * size[0], 0, 1, 0)),
        partial(_affine, lambda by, size: (1, 0, 0, 0, 1, 0.45 * by * size[1])),
    )


_ORIGINAL, _INCREASING = _operations(False), _operations(True)
