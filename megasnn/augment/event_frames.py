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
    """The usual recipe for CIFAR10-DVS: mirror half of the samples, roll by up to 5 pixels each way (TET, 2022)."""
    draws = keyed_numbers(seed, "dvs", epoch, sample)
    return _roll(_flip(frames, draws), draws)


def flip_and_one_more(frames: NDArray[Any], seed: int, epoch: int, sample: int) -> NDArray[Any]:
    """Neuromorphic data augmentation (Li et al. 2022, arXiv 2203.06145): mirror half, then one of four changes.

    Roll by up to 5 pixels, rotate or shear along x by up to 30 degrees, or empty a square of 8 pixels.
    """
    # Magnitudes of the authors' program for 48 x 48 pixels.
    draws = keyed_numbers(seed, "nda", epoch, sample)
    frames = _flip(frames, draws)
    which = draws.integers(4)
    if which == 0:
        return _roll(frames, draws)
    if which == 1:
        return _cut_out(frames, draws)
    angle = np.radians(draws.uniform(-_DEGREES, _DEGREES))
    cos = float(np.cos(angle))
    sin = float(np.sin(angle))
    if which == 2:
        return _sample_at(frames, cos, sin, -sin, cos)
    return _sample_at(frames, 1.0, float(np.tan(angle)), 0.0, 1.0)


def _flip(frames: NDArray[Any], draws: np.random.Generator) -> NDArray[Any]:
    return frames[..., ::-1] if draws.integers(2) else frames


def _roll(frames: NDArray[Any], draws: np.random.Generator) -> NDArray[Any]:
    down = draws.integers(2 * _ROLL + 1) - _ROLL
    right = draws.integers(2 * _ROLL + 1) - _ROLL
    # Pixels that leave on one side enter on the other: no event is lost.
    return np.roll(frames, (down, right), (-2, -1))


def _cut_out(frames: NDArray[Any], draws: np.random.Generator) -> NDArray[Any]:
    height, width = frames.shape[-2:]
    y = draws.integers(height)
    x = draws.integers(width)
    half = _CUT_OUT // 2
    changed = frames.copy()
    changed[..., max(0, y - half) : y + half, max(0, x - half) : x + half] = 0
    return changed


def _sample_at(frames: NDArray[Any], xx: float, xy: float, yx: float, yy: float) -> NDArray[Any]:
    """Moves pixels by a matrix around the middle; zero from outside."""
    # Each pixel takes the nearest source, without interpolation, so that counts stay counts.
    height, width = frames.shape[-2:]
    y, x = np.mgrid[:height, :width] - np.array([(height - 1) / 2, (width - 1) / 2])[:, None, None]
    column = np.rint(xx * x + xy * y + (width - 1) / 2).astype(np.intp)
    row = np.rint(yx * x + yy * y + (height - 1) / 2).astype(np.intp)
    inside = (0 <= column) & (column < width) & (0 <= row) & (row < height)
    source = np.where(inside, row * width + column, 0)
    return frames.reshape(*frames.shape[:-2], -1)[..., source] * inside.astype(frames.dtype)
