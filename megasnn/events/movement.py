"""Ways that an image takes before a simulated camera, as the recorded data sets moved theirs.

A path is the corners it passes, (x, y) with x to the right and y down, in units that the simulated sensor's `reach`
gives in pixels. Each way between two corners takes equally long; it begins and ends at rest, with the speed of half a
wave of a sine between, as that of something with a mass that a motor turns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Path = tuple[tuple[float, float], ...]

SACCADES: Path = ((-0.5, -0.5), (0.0, 0.5), (0.5, -0.5), (-0.5, -0.5))
"""N-MNIST: three saccades along the sides of a triangle (Orchard et al. 2015)."""

CLOSED_LOOP: Path = ((0.0, 0.0), (0.5, 0.5), (1.0, 0.0), (0.5, -0.5), (0.0, 0.0))
"""CIFAR10-DVS: a smooth closed loop with four directions (Li et al. 2017)."""

STILL: Path = ((0.0, 0.0), (0.0, 0.0))
"""No movement."""


def positions(path: Path, progress: NDArray) -> NDArray:
    """x and y, [2, N], at N times from 0 (beginning) to 1 (end)."""
    corners = np.array(path, np.float64)
    way, part = np.divmod(np.asarray(progress) * (len(path) - 1), 1)
    passed = way + (1 - np.cos(np.pi * part)) / 2
    return np.stack([np.interp(passed, np.arange(len(path)), corners[:, axis]) for axis in (0, 1)])
