"""Ways that an image takes before a simulated camera, as the recorded data sets moved theirs.

A path is the corners it passes, each way between two of them equally long in time; (x, y) with x to the right and y
down, in units that the simulated sensor's `reach` gives in pixels.
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
    at = np.linspace(0, 1, len(corners))
    return np.stack([np.interp(progress, at, corners[:, axis]) for axis in (0, 1)])
