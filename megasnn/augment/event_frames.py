"""Random changes of event frames, `[T, 2, H, W]`: all frames of a sample change alike."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasnn.common.random import keyed_numbers

_ROLL = 5  # pixels
_DEGREES = 30.0
_CUT_OUT = 8  # pixels


def flip_and_roll(frames: NDArray[Any], seed: int, epoch: int, sample: int) -> NDArray[Any]:
    """The usual recipe for CIFAR10-DVS on `[T, 2, H, W]`: mirror half of them, roll by up to 5 pixels each way.

    Same shape out; all frames of a sample are changed alike. Deng et al. 2022 (TET) and those after them.
    """
    draws = keyed_numbers(seed, "dvs", epoch, sample)
    return _roll(_flip(frames, draws), draws)


def flip_and_one_more(frames: NDArray[Any], seed: int, epoch: int, sample: int) -> NDArray[Any]:
    """Neuromorphic data augmentation on `[T, 2, H, W]`: mirror half of them, then one change of four, equally likely.

    Roll by up to 5 pixels each way, rotate by up to 30 degrees, shear along x by up to 30 degrees, or empty a square
    of 8 pixels, which may reach over the border. Same shape out; all frames of a sample are changed alike, and counts
    stay counts (each pixel takes the nearest one's).

    Li et al. 2022 (arXiv 2203.06145), with the magnitudes of their program for 48 x 48 pixels.
    """
    draws = keyed_numbers(seed, "nda", epoch, sample)
    frames, which = _flip(frames, draws), draws.integers(4)
    if which == 0:
        return _roll(frames, draws)
    if which == 1:
        return _cut_out(frames, draws)
    angle = np.radians(draws.uniform(-_DEGREES, _DEGREES))
    cos, sin, shear = float(np.cos(angle)), float(np.sin(angle)), float(np.tan(angle))
    return _sample_at(frames, *((cos, sin, -sin, cos) if which == 2 else (1.0, shear, 0.0, 1.0)))


def _flip(frames: NDArray[Any], draws: np.random.Generator) -> NDArray[Any]:
    return frames[..., ::-1] if draws.integers(2) else frames


def _roll(frames: NDArray[Any], draws: np.random.Generator) -> NDArray[Any]:
    return np.roll(frames, [draws.integers(2 * _ROLL + 1) - _ROLL for _ in range(2)], (-2, -1))


def _cut_out(frames: NDArray[Any], draws: np.random.Generator) -> NDArray[Any]:
    y, x = (draws.integers(side) for side in frames.shape[-2:])
    half, frames = _CUT_OUT // 2, frames.copy()
    frames[..., max(0, y - half) : y + half, max(0, x - half) : x + half] = 0
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
