"""RandAugment (Cubuk et al. 2019, arXiv 1909.13719) on Pillow images, with timm's operations, ranges and names."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

Fill = tuple[int, ...]
NAMES = (
    *("auto-contrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize-add"),
    *("color", "contrast", "brightness", "sharpness", "shear-x", "shear-y", "translate-x", "translate-y"),
)
"""Operations, in the order in which numbers choose them."""
_ENHANCERS = {name: getattr(ImageEnhance, name.title()) for name in ("color", "contrast", "brightness", "sharpness")}
_STRONGEST = 10.0  # the magnitude that stands for the end of each operation's range
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
_FORM = rf"rand-m{_NUMBER}(?:-n([1-9]))?(?:-mstd{_NUMBER})?-inc1"


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
    names: tuple[str, ...] = NAMES

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
    names = NAMES if only is None else tuple(name.strip() for name in only.split(","))
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"--rand-augment: there is no operation {unknown[0][:80]!r}; there are {', '.join(NAMES)}")
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
