"""Random changes of an image, keyed by seed, epoch and sample: no layout or worker count alters them."""

from __future__ import annotations

import numpy as np

from megasnn.random import keyed_seed

_MARGIN = 4


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
