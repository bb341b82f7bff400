"""Random changes of a sample, keyed by seed, epoch and sample: no layout or worker count alters them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasnn.random import keyed_seed
from megasnn.table import Table

_MARGIN = 4
_ROLL = 5  # pixels
_DEGREES = 30.0
_CUT_OUT = 8  # pixels

IMAGES, FRAMES = "images", "event frames"  # kinds of samples


@dataclass(frozen=True)
class Augmentation:
    """
    Attributes:
        summary: for --help.
        change: (sample, seed, epoch, number of the sample) -> another one of the same shape.
        samples: the kinds that it is for.
        normalisation: the name of the constants by which RGB images are normalised with it.
    """

    summary: str
    change: Callable[[NDArray[Any], int, int, int], NDArray[Any]]
    samples: tuple[str, ...]
    normalisation: str = "generic"

    def __call__(self, sample: NDArray[Any], seed: int, epoch: int, number: int) -> NDArray[Any]:
        return self.change(sample, seed, epoch, number)


def unchanged(sample: NDArray[Any], seed: int, epoch: int, number: int) -> NDArray[Any]:
    """The sample itself."""
    return sample


def crop_and_flip(image: np.ndarray, seed: int, epoch: int, sample: int) -> np.ndarray:
    """The usual CIFAR recipe on uint8 `[H, W, C]`: cut out of a 4-pixel black frame, mirror half of them.

    Same shape out. Shifts are uniform over the 9 × 9 positions.
    """
    words = np.random.Philox(key=keyed_seed(seed, "augment", epoch, sample)).random_raw(3)
    down, right = (int(word % (2 * _MARGIN + 1)) - _MARGIN for word in words[:2])
    shifted = np.zeros_like(image)
    height, width = image.shape[:2]
    shifted[max(-down, 0) : height - max(down, 0), max(-right, 0) : width - max(right, 0)] = image[
        max(down, 0) : height - max(-down, 0), max(right, 0) : width - max(-right, 0)
    ]
    return shifted[:, ::-1] if words[2] & 1 else shifted


def flip_and_roll(frames: NDArray[Any], seed: int, epoch: int, sample: int) -> NDArray[Any]:
    """The usual recipe for CIFAR10-DVS on `[T, 2, H, W]`: mirror half of them, roll by up to 5 pixels each way.

    Same shape out; all frames of a sample are changed alike. Deng et al. 2022 (TET) and those after them.
    """
    words = _words(seed, "dvs", epoch, sample)
    return _roll(_flip(frames, next(words)), next(words), next(words))


def roll(frames: NDArray[Any], seed: int, epoch: int, sample: int) -> NDArray[Any]:
    """Rolls `[T, 2, H, W]` by up to 2 pixels each way: for digits and others that a mirror makes something else of."""
    words = _words(seed, "roll", epoch, sample)
    return _roll(frames, next(words), next(words), most=2)


def flip_and_one_more(frames: NDArray[Any], seed: int, epoch: int, sample: int) -> NDArray[Any]:
    """Neuromorphic data augmentation on `[T, 2, H, W]`: mirror half of them, then one change of four, equally likely.

    Roll by up to 5 pixels each way, rotate by up to 30 degrees, shear along x by up to 30 degrees, or empty a square
    of 8 pixels, which may reach over the border. Same shape out; all frames of a sample are changed alike, and counts
    stay counts (each pixel takes the nearest one's).

    Li et al. 2022 (arXiv 2203.06145), with the magnitudes of their program for 48 x 48 pixels.
    """
    words = _words(seed, "nda", epoch, sample)
    frames = _flip(frames, next(words))
    which, first, second = next(words) % 4, next(words), next(words)
    if which == 0:
        return _roll(frames, first, second)
    if which == 1:
        return _cut_out(frames, first, second)
    angle = np.radians(_DEGREES * (2 * _unit(first) - 1))
    cos, sin, shear = float(np.cos(angle)), float(np.sin(angle)), float(np.tan(angle))
    return _sample_at(frames, *((cos, sin, -sin, cos) if which == 2 else (1.0, shear, 0.0, 1.0)))


AUGMENTATIONS: Table[Augmentation] = Table(
    "--augment",
    {
        "none": Augmentation("", unchanged, (IMAGES, FRAMES)),
        "cifar": Augmentation("crop and flip images", crop_and_flip, (IMAGES,), normalisation="cifar10"),
        "dvs": Augmentation("flip and roll event frames", flip_and_roll, (FRAMES,)),
        "nda": Augmentation(
            "flip them, then roll, rotate, shear or cut out (Li et al. 2022)", flip_and_one_more, (FRAMES,)
        ),
        "roll": Augmentation("roll them by up to 2 pixels", roll, (FRAMES,)),
    },
)


def _words(seed: int, recipe: str, epoch: int, sample: int) -> Iterator[int]:
    return iter(np.random.Philox(key=keyed_seed(seed, recipe, epoch, sample)).random_raw(4).tolist())


def _unit(word: int) -> float:
    """A number in [0, 1) from 64 random bits."""
    return (word >> 11) * 2.0**-53


def _flip(frames: NDArray[Any], word: int) -> NDArray[Any]:
    return frames[..., ::-1] if word & 1 else frames


def _roll(frames: NDArray[Any], first: int, second: int, most: int = _ROLL) -> NDArray[Any]:
    return np.roll(frames, [word % (2 * most + 1) - most for word in (first, second)], (-2, -1))


def _cut_out(frames: NDArray[Any], first: int, second: int) -> NDArray[Any]:
    height, width = frames.shape[-2:]
    top, left = (max(0, word % side - _CUT_OUT // 2) for word, side in ((first, height), (second, width)))
    bottom, right = (word % side + _CUT_OUT // 2 for word, side in ((first, height), (second, width)))
    frames = frames.copy()
    frames[..., top:bottom, left:right] = 0
    return frames


def _sample_at(frames: NDArray[Any], xx: float, xy: float, yx: float, yy: float) -> NDArray[Any]:
    """Each pixel takes the nearest one to where the matrix takes it, around the middle; zero from outside."""
    height, width = frames.shape[-2:]
    y, x = np.mgrid[:height, :width] - np.array([(height - 1) / 2, (width - 1) / 2])[:, None, None]
    column = np.rint(xx * x + xy * y + (width - 1) / 2).astype(np.intp)
    row = np.rint(yx * x + yy * y + (height - 1) / 2).astype(np.intp)
    inside = (0 <= column) & (column < width) & (0 <= row) & (row < height)
    place = np.where(inside, row * width + column, 0)
    return frames.reshape(*frames.shape[:-2], -1)[..., place] * inside.astype(frames.dtype)
