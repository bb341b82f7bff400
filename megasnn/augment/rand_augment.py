"""RandAugment (Cubuk et al. 2019, arXiv 1909.13719) on Pillow images, with timm's operations, ranges and names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from PIL import Image, ImageEnhance, ImageOps

from megasnn.random import Draws

Fill = tuple[int, ...]
NAMES = (
    *("auto-contrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize-add"),
    *("color", "contrast", "brightness", "sharpness", "shear-x", "shear-y", "translate-x", "translate-y"),
)
"""Operations, in the order in which numbers choose them."""
_ENHANCERS = {name: getattr(ImageEnhance, name.title()) for name in ("color", "contrast", "brightness", "sharpness")}
_STRONGEST = 10.0  # the magnitude that stands for the end of each operation's range
_MOST = 15
_UNIFORM = 100  # a deviation above it stands for a uniform distribution
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
        for chosen in [draws.below(len(self.names)) for _ in range(self.count)]:
            if draws.unit() < self.probability:
                strength = self._magnitude(draws) / _STRONGEST
                image = operate(self.names[chosen], image, strength, self.increasing, draws, fill)
        return image

    def _magnitude(self, draws: Draws) -> float:
        magnitude = self.magnitude
        if self.deviation > _UNIFORM:
            magnitude = draws.between(0, magnitude)
        elif self.deviation:
            magnitude += self.deviation * float(draws.normals(1)[0])
        return max(0.0, min(magnitude, self.highest))


def parse_rand_augment(text: str, only: str | None = None) -> RandAugment:
    """Parses timm's name of a variant. Raises ValueError for another text.

    Args:
        only: names of operations with commas between them; None for all.
    """
    first, *sections = text[:200].split("-")
    values: dict[str, float] = {}
    for section in sections:
        found = re.fullmatch(r"(m|n|mstd|mmax|p|inc)([0-9]{1,9}(?:\.[0-9]{1,9})?)", section)
        if not found or found[1] in values:
            raise ValueError(f"--rand-augment {text[:80]}: it is written like {_FORM}")
        values[found[1]] = float(found[2])
    if first != "rand":
        raise ValueError(f"--rand-augment {text[:80]}: it is written like {_FORM}")
    count, increasing, probability = values.get("n", 2.0), values.get("inc", 0.0), values.get("p", 0.5)
    if count not in range(1, _MOST + 1) or increasing not in (0, 1) or probability > 1:
        raise ValueError(f"--rand-augment {text}: n is one of 1 to {_MOST}, inc is 0 or 1, and p at most 1")
    magnitude, highest = values.get("m", _STRONGEST), values.get("mmax", _STRONGEST)
    names = NAMES if only is None else tuple(name.strip() for name in only.split(","))
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"--rand-augment: there is no operation {unknown[0][:80]!r}; there are {', '.join(NAMES)}")
    return RandAugment(magnitude, int(count), values.get("mstd", 0.0), highest, probability, increasing == 1, names)


def operate(name: str, image: Image.Image, strength: float, increasing: bool, draws: Draws, fill: Fill) -> Image.Image:
    """Applies one operation.

    Args:
        strength: from 0 to 1, the end of the operation's range.
        increasing: the operation becomes stronger with it; originally some become weaker.
    """
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
            bits = max(0, 4 - int(4 * strength)) if increasing else int(4 * strength)
            return _by_value(image, [value >> 8 - bits << 8 - bits for value in range(256)])
        case "solarize":
            threshold = int(256 * strength)
            return ImageOps.solarize(image, 256 - threshold if increasing else threshold)
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
            factor = max(0.1, 1 + _sign(draws) * 0.9 * strength) if increasing else 0.1 + 1.8 * strength
            return _ENHANCERS[name](image).enhance(factor)


def _sign(draws: Draws) -> int:
    return -1 if draws.coin() else 1


def _affine(image: Image.Image, matrix: tuple[float, ...], fill: Fill) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=fill)


def _by_value(image: Image.Image, values: list[int]) -> Image.Image:
    return image.point(values * len(image.getbands()))
